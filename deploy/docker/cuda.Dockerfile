# Quire on NVIDIA GPUs: docker build -f deploy/docker/cuda.Dockerfile -t quire:cuda .
FROM python:3.12-slim-bookworm AS build
# A wheel index to take torch from, in place of the usual one.
ARG TORCH_INDEX=
WORKDIR /src
RUN python -m venv /opt/quire
# What changes rarely goes first: torch, then the dependencies, then Quire itself.
COPY constraints.txt pyproject.toml README.md LICENSE Makefile ./
RUN version=$(sed -n 's/^TORCH_VERSION := //p' Makefile) \
    && /opt/quire/bin/pip install --no-cache-dir --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$version"
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['otel'], *p['optional-dependencies']['s3'], sep='\n')" > requirements.txt \
    && /opt/quire/bin/pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
COPY quire quire
RUN /opt/quire/bin/pip install --no-cache-dir --no-deps .

FROM python:3.12-slim-bookworm
# torch brings CUDA, the driver comes from the host (NVIDIA Container Toolkit). Triton compiles its launchers with gcc;
# compiled kernels are kept in /var/cache/quire.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /var/lib/quire --create-home quire \
    && mkdir -p /models /var/cache/quire \
    && chown quire:quire /models /var/cache/quire
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    HF_HOME=/models \
    XDG_CACHE_HOME=/var/cache/quire \
    TRITON_CACHE_DIR=/var/cache/quire/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    XDG_STATE_HOME=/var/lib/quire \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/quire
VOLUME ["/models", "/var/cache/quire", "/var/lib/quire"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# It counts as unhealthy only if it stays so for long after its start: a large model takes minutes to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quire", "serve"]
