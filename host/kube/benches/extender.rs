//! `filter` for 500 nodes and `bind`, over HTTP, beside an API server that answers at once. The
//! goals are 20 ms and 5 ms.

#![allow(missing_docs)]

#[path = "../tests/extender/api.rs"]
#[allow(dead_code)]
mod api;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use rocinante_placement::{Uplink, to_json};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use self::api::Api;

const NODES: usize = 500;
/// Bytes of a node that are not read: conditions, images, managed fields.
const NODE_BYTES: usize = 8 << 10;

async fn post(at: SocketAddr, path: &str, body: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(at).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    let head = format!("{head}Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    answer
}

fn all(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (api, at) = runtime.block_on(async {
        let api = Api::start(Duration::ZERO).await;
        let uplinks = ["ens1", "ens2", "ens3", "ens4"].map(|it| Uplink::new(it, 25_000_000_000));
        for node in 0..NODES {
            api.add_node(&format!("n{node}"), &to_json(&uplinks).unwrap());
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (assumed, lease) = (rocinante_kube::ASSUMED_FOR, rocinante_kube::LEASE_FOR);
        tokio::spawn(rocinante_kube::extender(api.client(), listener, assumed, lease));
        (api, at)
    });
    let names: Vec<String> = (0..NODES).map(|node| format!("n{node}")).collect();
    let filler = "x".repeat(NODE_BYTES);
    let nodes: Vec<Value> = names
        .iter()
        .map(|name| json!({"metadata": {"name": name}, "status": {"images": filler}}))
        .collect();
    let required = r#"[{"min_tx_rate":15000},{"min_tx_rate":5000},{"min_tx_rate":12000}]"#;
    let annotations = json!({rocinante_kube::REQUIRED: required});
    let pod = json!({"metadata": {"uid": "asks", "annotations": annotations}});
    let forms = [
        ("names", json!({"Pod": pod, "Nodes": null, "NodeNames": names})),
        ("nodes", json!({"Pod": pod, "Nodes": {"items": nodes}, "NodeNames": null})),
    ];
    for (form, body) in forms {
        let body = body.to_string();
        // It is ready once it lets all through.
        runtime.block_on(async {
            loop {
                let answer = post(at, "/scheduler/filter", body.as_bytes()).await;
                if String::from_utf8_lossy(&answer).contains(r#""Error":"""#) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let name = format!("filter/{NODES} {form}, {} KiB", body.len() >> 10);
        criterion.bench_function(&name, |bencher| {
            bencher.iter(|| runtime.block_on(post(at, "/scheduler/filter", body.as_bytes())));
        });
    }
    let mut made = 0_usize;
    criterion.bench_function("bind", |bencher| {
        bencher.iter_custom(|rounds| {
            let mut taken = Duration::ZERO;
            for _ in 0..rounds {
                made += 1;
                let pod = format!("p{made}");
                let uid = api.add_pod(&pod, r#"[{"min_tx_rate":1}]"#);
                let node = &names[made % NODES];
                let body = json!({
                    "PodName": pod, "PodNamespace": "default", "PodUID": uid, "Node": node,
                });
                let begun = Instant::now();
                let answer =
                    runtime.block_on(post(at, "/scheduler/bind", body.to_string().as_bytes()));
                taken += begun.elapsed();
                assert!(answer.ends_with(br#"{"Error":""}"#));
                api.delete_pod(&pod);
            }
            taken
        });
    });
}

criterion_group!(benches, all);
criterion_main!(benches);
