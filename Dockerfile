# The service as an image: one static-enough binary on Debian slim, run by an unprivileged user.
#
#   docker build --tag dedup-gate .
#   docker run --env API_KEYS=n8n:SECRET --publish 127.0.0.1:8080:8080 --volume dedup-gate:/data dedup-gate
#
# Without an engine, scripts/image builds it too. It reads the two base images off the FROM lines below.

FROM rust:1.95-slim-bookworm AS build

# OpenSSL is compiled from source and configured by a Perl script; the slim base has a C compiler alone.
# Versions are Debian's to fix: a pinned one disappears from the mirrors with the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends make perl \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /build

# A layer of the dependencies alone: it is built anew only when Cargo.toml or Cargo.lock change. What came of
# the stand-in is thrown away again, or cargo, which compares times, could take it for the real crate.
COPY .cargo .cargo
COPY Cargo.toml Cargo.lock ./
RUN mkdir src \
 && echo 'fn main() {}' > src/main.rs \
 && touch src/lib.rs \
 && cargo build --release --locked \
 && cargo clean --release --locked --package dedup-gate \
 && rm -r src

COPY migrations migrations
COPY src src
RUN cargo build --release --locked


FROM debian:bookworm-slim

# The certificates are for webhooks, and for `sslmode=verify-full` in DATABASE_URL. /data is where the SQLite file
# lives; a volume takes over its owner.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && install --directory --owner=10001 --group=10001 --mode=0750 /data

# For n8n: deploy/self-hosted-ai-starter-kit takes both from here.
COPY n8n-workflows /usr/share/dedup-gate/n8n-workflows
COPY deploy/self-hosted-ai-starter-kit/import.sh /usr/share/dedup-gate/import.sh

COPY --from=build /build/target/release/dedup-gate /usr/local/bin/dedup-gate

# Beyond loopback the service refuses to start without API_KEYS, which has no default on purpose.
ENV LISTEN=0.0.0.0:8080 \
    DATABASE_URL=sqlite:/data/dedup-gate.db

# A number, so that Kubernetes' runAsNonRoot can tell that it is not root.
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8080

# An absent database is waited for for 30 s before the service gives up.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["dedup-gate", "healthcheck"]

# No shell in between: SIGTERM reaches the service itself.
ENTRYPOINT ["dedup-gate"]
CMD ["serve"]
