# docker build --target cpu -t ringattn .          docker run --rm ringattn plan ranks=8 tokens=1M
# docker build --target cuda -t ringattn:cuda .    docker run --rm --gpus all --ipc=host ringattn:cuda doctor

FROM python:3.12-slim AS cpu
WORKDIR /app
COPY pyproject.toml constraints.txt constraints-torch.txt README.md LICENSE ./
COPY ringattn ringattn
COPY conf conf
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        -c constraints.txt -c constraints-torch.txt . \
    && useradd --create-home --uid 10001 ringattn
# a number, so that Kubernetes can see that it is not root
USER 10001
WORKDIR /home/ringattn
ENTRYPOINT ["ringattn"]
CMD ["doctor"]

# torch, with its CUDA libraries, comes with the base image: required by its exact version, it is not installed again.
FROM pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime AS cuda
WORKDIR /app
# Triton, which merges partial results, compiles a small C file for the Python that runs.
# hadolint ignore=DL3008  # Ubuntu keeps only the newest version of a package, so that a pin would end with the next one
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ringattn ringattn
COPY conf conf
RUN torch="$(python -c 'from importlib.metadata import version; print("torch==" + version("torch"))')" \
    && pip install --no-cache-dir -c constraints.txt "$torch" . \
    && useradd --create-home --uid 10001 ringattn
USER 10001
WORKDIR /home/ringattn
ENTRYPOINT ["ringattn"]
CMD ["doctor"]
