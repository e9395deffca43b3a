# The image for every process: `docker build -t unbroken .`, then `docker run unbroken registry|worker|frontend …`.
#
# With `--build-arg EXTRAS=` it contains neither llama.cpp nor tokenizers nor `unbroken certs`, which is enough for mocker workers and their
# frontends. Workers on GPUs have an image of their own: Dockerfile.trtllm.

FROM python:3.11-slim-bookworm AS build
ARG EXTRAS=llamacpp,huggingface,certs
WORKDIR /src
RUN python -m venv /opt/unbroken
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .
RUN wheel="$(ls /dist/unbroken-*.whl)" \
    && /opt/unbroken/bin/pip install --no-cache-dir "${wheel}${EXTRAS:+[${EXTRAS}]}"

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/unbroken --create-home unbroken \
    && install -d -o unbroken -g unbroken /var/lib/unbroken/.cache
COPY --from=build /opt/unbroken /opt/unbroken
ENV PATH=/opt/unbroken/bin:$PATH
USER unbroken
WORKDIR /var/lib/unbroken
# Pulled models. A volume at this path keeps them.
VOLUME /var/lib/unbroken/.cache
ENTRYPOINT ["unbroken"]
CMD ["--help"]
