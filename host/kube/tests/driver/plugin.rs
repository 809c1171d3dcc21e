//! The device plugin.

use std::collections::HashMap;
use std::time::Duration;

use rocinante_kube::HCA;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tonic::Code;

use crate::folder::names;
use crate::kubelet::api::{ContainerAllocateResponse, Mount};
use crate::{DEVICES, Node, until};

const ALL: usize = DEVICES as usize;
const FIRST: &str = "rocinante-hca-0.sock";
const SECOND: &str = "rocinante-hca-1.sock";

/// What a container gets without a file of CDI.
fn plain() -> ContainerAllocateResponse {
    let path = || "/run/rocinante".to_owned();
    ContainerAllocateResponse {
        envs: HashMap::from([("ROCINANTE_AGENT".into(), "/run/rocinante/agent.sock".into())]),
        mounts: vec![Mount { container_path: path(), host_path: path(), read_only: true }],
        cdi_devices: Vec::new(),
    }
}

#[tokio::test]
async fn a_container_gets_the_agents_socket() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    node.kubelet.start();
    node.has_healthy(ALL).await;
    let (_, registration) = node.kubelet.registrations().remove(0);
    assert_eq!((&*registration.version, &*registration.resource_name), ("v1beta1", HCA));
    assert_eq!(node.kubelet.allocate(1).await.unwrap(), plain());

    // The agent's own file of CDI, another's, and a file that is none.
    let file = node.folder.at("cdi").join("rocinante.json");
    let agents = include_str!("../../../agent/dist/cdi.json");
    for (text, is_agents) in [
        (agents.to_owned(), true),
        (agents.replace("\"0\"", "\"1\""), false),
        (agents.replace("/hca", "/other"), false),
        (agents[..agents.len() / 2].to_owned(), false),
        (String::new(), false),
    ] {
        std::fs::write(&file, &text).unwrap();
        let given = node.kubelet.allocate(1).await.unwrap();
        let named: Vec<&str> = given.cdi_devices.iter().map(|it| &*it.name).collect();
        assert_eq!(named, if is_agents { vec!["rocinante.dev/hca=0"] } else { vec![] }, "{text}");
        assert_eq!(ContainerAllocateResponse { cdi_devices: Vec::new(), ..given }, plain());
    }
    // With CDI or without, a container has the same variable and the same mount.
    let agents: serde_json::Value = serde_json::from_str(agents).unwrap();
    let edits = &agents["devices"][0]["containerEdits"];
    assert_eq!(edits["env"], json!(["ROCINANTE_AGENT=/run/rocinante/agent.sock"]));
    let (mount, plain) = (&edits["mounts"][0], plain().mounts.remove(0));
    assert_eq!(mount["hostPath"], plain.host_path);
    assert_eq!(mount["containerPath"], plain.container_path);

    // Two of the eight are left.
    assert!(node.kubelet.allocate(3).await.is_err());
    assert!(node.kubelet.allocate(2).await.is_ok());
}

#[tokio::test]
async fn devices_that_are_none_are_refused() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    node.kubelet.start();
    node.has_healthy(ALL).await;
    let long = "0".repeat(1 << 20);
    for ids in [&["8"][..], &["0", "x"], &[""], &["00"], &["+1"], &["-1"], &[&long]] {
        let refused = node.kubelet.allocate_these(ids).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{refused}");
    }
    let refused = node.kubelet.allocate_these(&[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    // More than a message may have.
    let many = vec!["7"; 2 << 20];
    assert_eq!(node.kubelet.allocate_these(&many).await.unwrap_err().code(), Code::OutOfRange);
    node.kubelet.allocate_these(&["7"]).await.unwrap();
}

#[tokio::test]
async fn it_registers_when_the_socket_comes_late() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    // First there is no folder, then no socket, then one at which nothing listens.
    tokio::time::sleep(crate::PERIOD * 3).await;
    std::fs::create_dir_all(node.kubelet.folder()).unwrap();
    until("it listens", async || names(node.kubelet.folder()) == [FIRST]).await;
    drop(std::os::unix::net::UnixListener::bind(node.kubelet.folder().join("kubelet.sock")));
    tokio::time::sleep(crate::PERIOD * 3).await;
    node.kubelet.start();
    node.has_healthy(ALL).await;
}

#[tokio::test]
async fn it_registers_again_after_the_folder_is_wiped() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    node.kubelet.start();
    node.has_healthy(ALL).await;
    node.kubelet.allocate(2).await.unwrap();
    for kubelets in 2..5 {
        // It wipes the folder.
        node.kubelet.start();
        assert_eq!(node.kubelet.count(), (0, ALL));
        node.has_healthy(ALL).await;
        assert!(node.kubelet.registrations().len() >= kubelets);
        // Running pods have their devices, and others get others.
        assert_eq!(node.kubelet.allocated(), kubelets);
        node.kubelet.allocate(1).await.unwrap();
        assert_eq!(node.sockets().len(), 1);
    }
    // It hangs up.
    node.kubelet.disconnect();
    node.has_healthy(ALL).await;
    node.kubelet.allocate(1).await.unwrap();
    // The kubelet lives on, and its folder is wiped.
    std::fs::remove_file(node.kubelet.folder().join(&node.sockets()[0])).unwrap();
    let before = node.kubelet.registrations().len();
    until("again", async || node.kubelet.registrations().len() > before).await;
    node.has_healthy(ALL).await;
    node.kubelet.allocate(1).await.unwrap();
}

#[tokio::test]
async fn a_version_that_does_not_meet_is_tried_again_with_pauses() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    node.kubelet.start_as("v1", Duration::ZERO);
    until("five times", async || node.kubelet.registrations().len() >= 5).await;
    for (before, pair) in node.kubelet.registrations().windows(2).take(4).enumerate() {
        assert!(pair[1].0 - pair[0].0 >= crate::PERIOD * (1 << before));
    }
    assert_eq!(node.kubelet.count(), (0, 0));
    // Another kubelet is asked at once.
    node.kubelet.start();
    node.has_healthy(ALL).await;
}

#[tokio::test]
async fn devices_are_healthy_as_long_as_the_agent_answers() {
    let node = Node::new().await;
    let _driver = node.driver();
    node.kubelet.start();
    node.has_healthy(0).await;
    let agent = node.agent(&[]);
    node.has_healthy(ALL).await;
    node.kubelet.allocate(1).await.unwrap();
    drop(agent);
    node.has_healthy(0).await;
    assert!(node.kubelet.allocate(1).await.is_err());
    assert_eq!(node.kubelet.allocated(), 1);

    let agent = node.agent(&[]);
    node.has_healthy(ALL).await;
    agent.hangs(true);
    node.has_healthy(0).await;
    agent.hangs(false);
    node.has_healthy(ALL).await;
    agent.raves(true);
    node.has_healthy(0).await;
    agent.raves(false);
    node.has_healthy(ALL).await;
    assert_eq!(node.kubelet.registrations().len(), 1);
    // A list is sent when something has changed.
    let before = agent.asked();
    until("a hundred questions", async || agent.asked() >= before + 100).await;
    let (lists, asked) = (node.kubelet.lists(), agent.asked());
    assert!(lists <= asked / 5, "{lists} beside {asked}");
}

#[tokio::test]
async fn a_slow_kubelet_is_asked_once() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    node.kubelet.start_as("v1beta1", Duration::from_secs(2));
    node.has_healthy(ALL).await;
    assert_eq!(node.kubelet.registrations().len(), 1);
    // One that ends while it is asked.
    node.kubelet.start_as("v1beta1", Duration::from_secs(3600));
    until("it is asked", async || node.kubelet.registrations().len() == 2).await;
    node.kubelet.start();
    node.has_healthy(ALL).await;
}

#[tokio::test]
async fn an_old_kubelet_connects_after_its_answer() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    node.kubelet.start_old(Duration::from_secs(1));
    node.has_healthy(ALL).await;
    assert_eq!(node.kubelet.registrations().len(), 1);
    node.kubelet.allocate(1).await.unwrap();
    node.kubelet.start_old(Duration::ZERO);
    node.has_healthy(ALL).await;
    node.kubelet.allocate(1).await.unwrap();
    assert_eq!(node.kubelet.allocated(), 2);
}

/// A driver beside others: it has a socket of its own, and the kubelet knows it.
async fn another(node: &Node) -> JoinSet<()> {
    let (sockets, asked) = (node.sockets().len(), node.kubelet.registrations().len());
    let driver = node.driver();
    until("another listens", async || node.sockets().len() > sockets).await;
    until("another is known", async || node.kubelet.registrations().len() > asked).await;
    driver
}

/// Waits until the plugin at this socket is the only one, and has taken another.
async fn moved(node: &Node, from: &str) {
    until("it moves", async || {
        let sockets = node.sockets();
        sockets.len() == 1 && sockets[0] != from
    })
    .await;
    node.serves().await;
}

#[tokio::test]
async fn of_two_plugins_the_one_that_stays_is_asked() {
    for by_socket in [false, true] {
        let node = Node::with_kubelet(by_socket).await;
        let _agent = node.agent(&[]);
        node.kubelet.start();
        let mut last = another(&node).await;
        // An update of a DaemonSet: the one that came last stays.
        for _ in 0..5 {
            let before = node.sockets();
            let next = another(&node).await;
            let both = node.sockets();
            assert_eq!((before.len(), both.len()), (1, 2));
            drop(std::mem::replace(&mut last, next));
            let stays = both.iter().find(|it| !before.contains(it)).unwrap();
            moved(&node, stays).await;
            node.kubelet.allocate(1).await.unwrap();
        }
        assert_eq!(node.kubelet.allocated(), 5);
        drop(last);
        node.has_healthy(0).await;
    }
}

#[tokio::test]
async fn a_plugin_stays_beside_many_that_come_and_go() {
    for by_socket in [false, true] {
        let node = Node::with_kubelet(by_socket).await;
        let _agent = node.agent(&[]);
        node.kubelet.start();
        let _stays = another(&node).await;
        // More than the connections of a plugin at a time.
        for _ in 0..70 {
            let stays = node.sockets().remove(0);
            drop(another(&node).await);
            moved(&node, &stays).await;
        }
    }
}

#[tokio::test]
async fn a_plugin_that_the_kubelet_drops_beside_another_comes_back() {
    for by_socket in [false, true] {
        let node = Node::with_kubelet(by_socket).await;
        let agent = node.agent(&[]);
        node.kubelet.start();
        let _first = another(&node).await;
        node.serves().await;
        let _second = another(&node).await;
        for _ in 0..2 {
            node.serves().await;
            // One that has not seen the stream yet would wait for it.
            let before = agent.asked();
            until("they look", async || agent.asked() >= before + 10).await;
            let asked = node.kubelet.registrations().len();
            node.kubelet.disconnect();
            until("again", async || node.kubelet.registrations().len() > asked).await;
        }
        node.serves().await;
        assert_eq!(node.sockets(), [FIRST, SECOND]);
    }
}

#[tokio::test]
async fn garbage_at_the_socket_harms_no_other() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    node.kubelet.start();
    node.has_healthy(ALL).await;
    let path = node.kubelet.folder().join(FIRST);
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let mut random = fastrand::Rng::with_seed(37);
    for number in 0..200 {
        let mut stream = UnixStream::connect(&path).await.unwrap();
        let mut bytes = if number % 2 == 0 { preface.to_vec() } else { Vec::new() };
        bytes.extend((0..random.usize(..300)).map(|_| random.u8(..)));
        // It may have hung up before all is written.
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    // As many as are served at a time, that send nothing; the kubelet has its connection.
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(UnixStream::connect(&path).await.unwrap());
    }
    node.kubelet.allocate(1).await.unwrap();
    // One that connects has to wait until the plugin has ended them.
    node.kubelet.disconnect();
    node.serves().await;
    drop(idle);
    node.kubelet.start();
    node.has_healthy(ALL).await;
}

/// The headers of a request of grpc-go as kubelets before 1.26 send them, without compression. The
/// authority, a path, is in the table of headers from the first request on.
fn request_of_an_old_kubelet(stream: u8, path: &str) -> Vec<u8> {
    let literal = |name: u8, value: &str| {
        [&[name, u8::try_from(value.len()).unwrap()], value.as_bytes()].concat()
    };
    let mut block = vec![0x83, 0x86];
    block.extend(literal(0x44, "/v1beta1.DevicePlugin/GetDevicePluginOptions"));
    // Index 1 with a literal that is kept; later the newest entry but two.
    block.extend(if stream == 1 { literal(0x41, path) } else { vec![0xc0] });
    block.extend(literal(0x5f, "application/grpc"));
    let frame = |kind: u8, flags: u8, payload: &[u8]| {
        let [.., a, b] = payload.len().to_be_bytes();
        [&[0, a, b, kind, flags, 0, 0, 0, stream], payload].concat()
    };
    [frame(1, 4, &block), frame(0, 1, &[0; 5])].concat()
}

#[tokio::test]
async fn a_kubelet_that_names_the_sockets_path_as_authority_is_answered() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[]), node.driver());
    node.kubelet.start();
    node.has_healthy(ALL).await;
    let path = node.kubelet.folder().join(FIRST);
    let mut stream = UnixStream::connect(&path).await.unwrap();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    stream.write_all(&settings).await.unwrap();
    for number in [1, 3] {
        // In pieces, as a stream may bring it.
        for byte in request_of_an_old_kubelet(number, path.to_str().unwrap()) {
            stream.write_all(&[byte]).await.unwrap();
        }
        loop {
            let mut header = [0; 9];
            stream.read_exact(&mut header).await.unwrap();
            let [a, b, c, kind, _, .., of] = header;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            stream.read_exact(&mut payload).await.unwrap();
            assert_ne!(kind, 3, "the request is reset: {payload:?}");
            if (kind, of) == (1, number) {
                break;
            }
        }
    }
}
