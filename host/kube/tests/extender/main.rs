//! The extender and the node's part, beside an API server of the tests' own.

mod api;
mod audit;
mod binds;
mod lease;
mod node;
mod process;
mod requests;
mod scheduler;
mod storm;
mod until;

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use self::api::Api;
use self::until::until;

/// How long an extender may be silent: longer than any is on a busy machine.
const LEASE: Duration = Duration::from_secs(60);

/// An extender in this process. It ends with this value.
struct Extender {
    address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Extender {
    /// One that has read all of the API's lists.
    async fn ready(api: &Api, assumed_for: Duration) -> Self {
        Self::start(api, assumed_for).await.readied().await
    }

    async fn readied(self) -> Self {
        until("the extender is ready", async || get(self.address, "/healthz").await.0 == 200).await;
        self
    }

    async fn start(api: &Api, assumed_for: Duration) -> Self {
        Self::start_with(api, assumed_for, LEASE).await
    }

    async fn start_with(api: &Api, assumed_for: Duration, lease: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = rocinante_kube::extender(api.client(), listener, assumed_for, lease);
        Self { address, task: tokio::spawn(served) }
    }
}

impl Drop for Extender {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The status and the body of an answer.
async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    answered(address, format!("GET {path} HTTP/1.1\r\n").into_bytes(), b"").await
}

async fn post(address: SocketAddr, path: &str, body: &[u8]) -> (u16, String) {
    let head = format!("POST {path} HTTP/1.1\r\nContent-Length: {}\r\n", body.len());
    answered(address, head.into_bytes(), body).await
}

/// The JSON of an answer that has to be one.
async fn posted(address: SocketAddr, path: &str, body: &Value) -> Value {
    let (status, text) = post(address, path, body.to_string().as_bytes()).await;
    assert_eq!(status, 200, "{path}: {text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {text}: {error}"))
}

async fn answered(address: SocketAddr, mut head: Vec<u8>, body: &[u8]) -> (u16, String) {
    head.extend(b"Host: x\r\nConnection: close\r\n\r\n");
    head.extend(body);
    let Ok(mut stream) = TcpStream::connect(address).await else { return (0, String::new()) };
    // A server that refuses the body does not read it.
    let _ = stream.write_all(&head).await;
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text).await;
    let text = String::from_utf8_lossy(&text).into_owned();
    let status = text.split(' ').nth(1).and_then(|it| it.parse().ok()).unwrap_or(0);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, body.to_owned())
}
