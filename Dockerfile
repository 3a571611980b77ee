# The package in an image, by the steps of README. `docker run IMAGE solve 53..7....` solves a board.
#   a CPU:  docker build -t hrm_hf .
#   a GPU:  docker build -t hrm_hf --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 \
#               --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#           docker run --gpus all --ipc host -v $PWD:/work hrm_hf preflight --require-gpu
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# g++ and Python's headers: torch.compile.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/hrm_hf
ENV PATH=${VIRTUAL_ENV}/bin:${PATH}
RUN python3 -m venv ${VIRTUAL_ENV}

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt torch --index-url ${TORCH_INDEX}
RUN pip install --no-cache-dir -c constraints.txt .

WORKDIR /work
ENTRYPOINT ["hrm-hf"]
CMD ["--help"]
