# docker build --target cpu -t ringattn .          docker run --rm ringattn plan ranks=8 tokens=1M
# docker build --target cuda -t ringattn:cuda .    docker run --rm --gpus all --ipc=host ringattn:cuda doctor

FROM python:3.12-slim AS cpu
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ringattn ringattn
COPY conf conf
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt . \
    && useradd --create-home ringattn
USER ringattn
WORKDIR /home/ringattn
ENTRYPOINT ["ringattn"]
CMD ["doctor"]

# torch, with its CUDA libraries, comes with the base image and is not installed again.
FROM pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime AS cuda
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ringattn ringattn
COPY conf conf
RUN grep -v '^torch==' constraints.txt > others.txt \
    && pip install --no-cache-dir -c others.txt . \
    && (id ringattn || useradd --create-home ringattn)
USER ringattn
WORKDIR /home/ringattn
ENTRYPOINT ["ringattn"]
CMD ["doctor"]
