# dpexp with torch for CPUs; with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 for CUDA.
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY . /source
RUN pip install --no-cache-dir -c /source/constraints.txt --extra-index-url "$TORCH_INDEX" /source && rm -r /source
# Any user may run it, as by docker run --user: HOME and USER are for the caches of libraries.
ENV HOME=/tmp USER=dpexp
WORKDIR /work
RUN chown nobody:nogroup /work
USER nobody
ENTRYPOINT ["python", "-m", "dpexp"]
