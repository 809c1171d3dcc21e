#!/bin/bash
# grpc-go 1.33 and h2 0.4 (Rust): a client that dials a Unix socket by its path, with a dialer of
# its own, gets no answer from a server on h2.
#
# grpc-go takes the target for the authority, as it has no scheme: `:authority` is the path, with
# its slashes. That is no authority of RFC 3986, and h2, below hyper and tonic, resets the stream.
# grpc-go's own server takes it. Kubelets before 1.26 dial device plugins so: a plugin in Rust
# registers, and the node never has its devices.
#
# Seen (golang-google-grpc-dev 1.33.3-2 with Go 1.19 of Debian 12, h2 0.4.20):
#   go: Unimplemented
#   h2: Internal, stream terminated by RST_STREAM with error code: PROTOCOL_ERROR
#
# It fails if that changes. It needs a Debian 12 with golang-1.19-go, apt-get's lists, and cargo.
set -euo pipefail
folder=$(mktemp -d)
trap 'jobs -p | xargs -r kill; rm -rf "$folder"' EXIT
cd "$folder"
mkdir -p debs/partial client server/src h2/src

apt-get install -qq --yes --reinstall --download-only --no-install-recommends \
    -o Dir::Cache::archives="$folder/debs" golang-google-grpc-dev=1.33.3-2 > /dev/null
for package in debs/*.deb; do dpkg -x "$package" unpacked; done

cat > client/main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

type nothing struct{}

func (nothing) Marshal(interface{}) ([]byte, error)    { return nil, nil }
func (nothing) Unmarshal([]byte, interface{}) error    { return nil }
func (nothing) Name() string                           { return "nothing" }

func main() {
	dial := func(ctx context.Context, path string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	conn, err := grpc.DialContext(ctx, os.Args[1], grpc.WithInsecure(), grpc.WithBlock(),
		grpc.WithContextDialer(dial))
	if err != nil {
		panic(err)
	}
	err = conn.Invoke(ctx, "/a.B/C", nil, nil, grpc.ForceCodec(nothing{}))
	why := status.Convert(err)
	fmt.Printf("%v, %s\n", why.Code(), why.Message())
}
GO
cat > server/main.go <<'GO'
package main

import (
	"net"
	"os"

	"google.golang.org/grpc"
)

func main() {
	listener, err := net.Listen("unix", os.Args[1])
	if err != nil {
		panic(err)
	}
	panic(grpc.NewServer().Serve(listener))
}
GO
cat > h2/Cargo.toml <<'TOML'
[package]
name = "answers"
version = "0.0.0"
edition = "2021"

[dependencies]
h2 = "=0.4.20"
http = "=1.5.0"
tokio = { version = "=1.54.1", features = ["macros", "net", "rt"] }
TOML
cat > h2/src/main.rs <<'RUST'
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let path = std::env::args().nth(1).unwrap();
    let listener = tokio::net::UnixListener::bind(path).unwrap();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                let answer = http::Response::builder()
                    .header("content-type", "application/grpc")
                    .header("grpc-status", "12");
                respond.send_response(answer.body(()).unwrap(), true).unwrap();
            }
        });
    }
}
RUST

export GOPATH="$folder/unpacked/usr/share/gocode" GO111MODULE=off GOCACHE="$folder/cache"
go=$(dpkg -L golang-1.19-go | grep "/bin/go$")
"$go" build -o ask ./client
"$go" build -o go-server ./server
CARGO_TARGET_DIR="$folder/target" cargo build -q --manifest-path h2/Cargo.toml

./go-server "$folder/go.sock" &
target/debug/answers "$folder/h2.sock" &
until [ -S go.sock ] && [ -S h2.sock ]; do sleep 0.1; done
by_go=$(./ask "$folder/go.sock")
by_h2=$(./ask "$folder/h2.sock")
echo "go: $by_go"
echo "h2: $by_h2"
[[ $by_go == Unimplemented,* ]]
[[ $by_h2 == "Internal, stream terminated by RST_STREAM with error code: PROTOCOL_ERROR" ]]
