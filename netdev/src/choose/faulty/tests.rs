//! Faults before ports of each backend.

use std::time::{Duration, Instant};

use crate::choose::any::AnyPort;
use crate::fault::Plan;
use crate::kernel::descriptors::wait_readable;
use crate::port::contract::{Backend, PathId, PathSpec, Port as _, RxIpId};
use crate::sim::{SimConfig, SimIpId, SimNet};
use crate::testing::ReceiveBy as _;
use crate::testing::sides::{Got, ip, on_each, receive_for, sides, spec};

/// Stands for the ICRC: the identification, at the end.
fn seal(_: &PathSpec, _: u16, id: u16, payload: &mut [u8]) {
    let at = payload.len() - 2;
    payload[at..].copy_from_slice(&id.to_be_bytes());
}

fn is_sealed(got: &Got) -> bool {
    let end = got.payload.len() - 2;
    let id = u16::from_be_bytes([got.payload[end], got.payload[end + 1]]);
    match got.ip_id {
        RxIpId::Exact { id: read, .. } => read == id,
        RxIpId::Hint(_) | RxIpId::None => true,
    }
}

fn with(port: AnyPort, text: &str) -> AnyPort {
    let plan = Plan::of_words(text, |_, _| Vec::new()).expect(text);
    port.with_faults((&plan, 7), 0, None, seal).expect("a descriptor")
}

/// Sends numbered datagrams of one length, in one flush.
fn send(port: &mut AnyPort, path: PathId, count: u16) {
    for number in 0..count {
        let slot = port.reserve(path, 200).expect("room");
        slot.buf.fill(number as u8);
        let id = slot.ip_id;
        seal(&spec("10.9.0.1", "10.9.0.2"), 0, id, slot.buf);
        port.commit();
    }
    port.flush(crate::testing::no_failure);
}

fn numbers(got: &[Got]) -> Vec<u8> {
    got.iter().map(|got| got.payload[0]).collect()
}

/// Two ports that reach each other without a fault, and then the faults of `of_a` and `of_b`.
fn pair(backend: Backend, of_a: &str, of_b: &str) -> Result<(impl Sized, Sides), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    let path = pair.a.run(|| a.add_path(&spec("10.9.0.1", "10.9.0.2"))).expect("a path");
    let end = Instant::now() + Duration::from_secs(20);
    // Until the neighbour is known.
    loop {
        let before = a.stats().tx_unresolved;
        send(&mut a, path.id, 1);
        let got = receive_for(&mut b, 1, Duration::from_millis(200));
        a.maintain();
        if got.len() == 1 && a.stats().tx_unresolved == before {
            break;
        }
        assert!(Instant::now() < end, "{backend} never sends directly");
    }
    a.remove_path(path.id);
    let (mut a, b) = (with(a, of_a), with(b, of_b));
    let path = pair.a.run(|| a.add_path(&spec("10.9.0.1", "10.9.0.2"))).expect("a path");
    send(&mut a, path.id, 0);
    Ok((pair, Sides { a, b, path: path.id }))
}

struct Sides {
    a: AnyPort,
    b: AnyPort,
    path: PathId,
}

const SHORT: Duration = Duration::from_millis(100);

/// Each fault hits single datagrams of a run, at either end.
fn faults(backend: Backend) -> Result<(), String> {
    for (of_a, of_b, want) in [
        ("every=3", "off", vec![0, 1, 3, 4, 6, 7]),
        ("off", "every=3", vec![0, 1, 3, 4, 6, 7]),
        ("every=2,side=ingress", "off", (0..9).collect()),
        ("dup=100%", "off", [(0..9).collect::<Vec<u8>>(), (0..9).collect()].concat()),
        ("off", "dup=100%", (0..9).flat_map(|n| [n, n]).collect()),
        ("partition", "off", vec![]),
        ("off", "mtu=227", vec![]),
        ("mtu=228", "mtu=228", (0..9).collect()),
    ] {
        let (_pair, Sides { mut a, mut b, path }) = pair(backend, of_a, of_b)?;
        send(&mut a, path, 9);
        let patience = if want.is_empty() { SHORT } else { Duration::from_secs(5) };
        let got = receive_for(&mut b, want.len().max(1), patience);
        assert_eq!(numbers(&got), want, "{backend}: {of_a}, {of_b}");
        assert!(got.iter().all(is_sealed), "{backend}: {of_a}, {of_b}: {got:?}");
        assert!(receive_for(&mut b, 1, Duration::from_millis(20)).is_empty());
    }
    Ok(())
}

/// One bit of each differs, and those that are held back, too.
fn corruption(backend: Backend) -> Result<(), String> {
    for (of_a, of_b) in
        [("corrupt=100%", "off"), ("off", "corrupt=1"), ("corrupt=1,delay=1ms", "off")]
    {
        let (_pair, Sides { mut a, mut b, path }) = pair(backend, of_a, of_b)?;
        send(&mut a, path, 9);
        if of_a.contains("delay") {
            std::thread::sleep(Duration::from_millis(2));
            a.receive_by(8, &mut |_| ()).unwrap();
        }
        let got = receive_for(&mut b, 9, Duration::from_secs(5));
        assert_eq!(got.len(), 9, "{backend}");
        let mut in_body = 0;
        for (number, got) in got.iter().enumerate() {
            let body = &got.payload[..198];
            let flipped: u32 = body.iter().map(|byte| (byte ^ number as u8).count_ones()).sum();
            let in_seal = u32::from(!is_sealed(got) && flipped == 0);
            let is_hidden = flipped == 0 && !matches!(got.ip_id, RxIpId::Exact { .. });
            assert!(flipped + in_seal == 1 || is_hidden, "{backend} {number}: {got:?}");
            in_body += flipped;
        }
        // The identification at the end is a hundredth of each.
        assert!(in_body >= 7, "{backend}: {in_body}, {got:?}");
    }
    Ok(())
}

/// A delayed datagram wakes the thread that waits, and leaves although its path is gone.
fn delay(backend: Backend) -> Result<(), String> {
    let held = Duration::from_millis(60);
    for (of_a, of_b) in [("delay=60ms", "off"), ("off", "delay=60ms,ecn=100%")] {
        let (_pair, Sides { mut a, mut b, path }) = pair(backend, of_a, of_b)?;
        let began = Instant::now();
        send(&mut a, path, 3);
        a.remove_path(path);
        let leaves_late = of_b == "off";
        let got = if leaves_late {
            assert!(wait_readable(a.wait_fd(), 2000).unwrap(), "{backend}: it wakes");
            while began.elapsed() < held {
                a.receive_by(8, &mut |_| ()).unwrap();
            }
            a.receive_by(8, &mut |_| ()).unwrap();
            receive_for(&mut b, 3, Duration::from_secs(5))
        } else {
            let mut got = Vec::new();
            while got.len() < 3 && began.elapsed() < Duration::from_secs(5) {
                assert!(wait_readable(b.wait_fd(), 2000).unwrap(), "{backend}: it wakes");
                b.receive_by(8, &mut |d| got.push(Got::from(d))).unwrap();
            }
            assert!(got.iter().all(|got| got.tos.is_some_and(|tos| tos & 3 == 3)), "{got:?}");
            got
        };
        assert!(began.elapsed() >= held, "{backend}: {:?}", began.elapsed());
        assert_eq!(numbers(&got), [0, 1, 2], "{backend}");
        assert!(got.iter().all(is_sealed), "{backend}: {got:?}");
    }
    Ok(())
}

/// A port that closes, and a program that ends, send delayed datagrams at once.
fn ends(backend: Backend) -> Result<(), String> {
    let (_pair, Sides { mut a, mut b, path }) = pair(backend, "delay=1m", "off")?;
    send(&mut a, path, 2);
    assert!(receive_for(&mut b, 1, SHORT).is_empty());
    a.let_go();
    assert_eq!(numbers(&receive_for(&mut b, 2, Duration::from_secs(5))), [0, 1], "{backend}");
    send(&mut a, path, 3);
    drop(a);
    assert_eq!(numbers(&receive_for(&mut b, 3, Duration::from_secs(5))), [0, 1, 2], "{backend}");
    Ok(())
}

on_each! { "choose/faulty":
    faults: on_udp Udp, on_packet Packet, on_afxdp Xdp;
    corruption: on_udp Udp, on_packet Packet, on_afxdp Xdp;
    delay: on_udp Udp, on_packet Packet, on_afxdp Xdp;
    ends: on_udp Udp, on_packet Packet, on_afxdp Xdp;
}

/// Of a flood of which nothing passes, a call reads only some.
#[test]
fn a_flood_that_is_lost_does_not_hold_its_thread() {
    let net = SimNet::new();
    let config = SimConfig { ip_id: SimIpId::Hint, ..SimConfig::default() };
    let port = |address: &str| net.port(&[ip(address)], &config).unwrap();
    let mut from = AnyPort::from(port("10.9.0.1"));
    let mut to = with(AnyPort::from(port("10.9.0.2")), "partition");
    let path = from.add_path(&spec("10.9.0.1", "10.9.0.2")).unwrap().id;
    send(&mut from, path, 1000);
    let mut receive = || to.receive_by(10, &mut |_| panic!("it is lost")).unwrap();
    assert_eq!(receive(), 10, "there is more");
    let calls = (1..1000).take_while(|_| receive() == 10).count();
    assert_eq!(calls, 11, "80 each");
    assert_eq!((receive(), to.stats().rx_datagrams), (0, 1000));
}

/// Each read of the port behind has the whole budget, and the queue is empty only when it is.
#[test]
fn a_burst_with_losses_is_read_whole() {
    let net = SimNet::new();
    let port = |address: &str| net.port(&[ip(address)], &SimConfig::default()).unwrap();
    let mut from = AnyPort::from(port("10.9.0.1"));
    let mut to = with(AnyPort::from(port("10.9.0.2")), "every=2");
    let path = from.add_path(&spec("10.9.0.1", "10.9.0.2")).unwrap().id;
    send(&mut from, path, 100);
    let mut got = Vec::new();
    let found = [40, 80, 100, 100].map(|read| {
        let handed = to.receive_by(20, &mut |d| got.push(d.payload[0])).unwrap();
        assert_eq!(to.stats().rx_datagrams, read);
        handed
    });
    assert_eq!(found, [20, 20, 10, 0]);
    assert_eq!(got, (0..100).step_by(2).collect::<Vec<u8>>());
}

/// Datagrams that were due while the port behind was full leave in their order, and wake for it.
#[test]
fn a_port_without_room_keeps_the_order() {
    let net = SimNet::new();
    let config = SimConfig::default();
    let (from, gate) = net.gated_port(&[ip("10.9.0.1")], &config).unwrap();
    let mut from = with(AnyPort::from(from), "delay=5ms");
    let mut to = AnyPort::from(net.port(&[ip("10.9.0.2")], &config).unwrap());
    let path = from.add_path(&spec("10.9.0.1", "10.9.0.2")).unwrap().id;
    // More than the port behind has room for.
    for number in 0..100 {
        let slot = from.reserve(path, 8000).expect("all are held back");
        slot.buf.fill(number);
        from.commit();
    }
    gate.shut();
    std::thread::sleep(Duration::from_millis(10));
    for _ in 0..20 {
        from.flush(crate::testing::no_failure);
        std::thread::sleep(Duration::from_micros(150));
    }
    gate.open();
    let (mut got, end) = (Vec::new(), Instant::now() + Duration::from_secs(10));
    while got.len() < 100 && Instant::now() < end {
        assert!(wait_readable(from.wait_fd(), 2000).unwrap(), "{} of 100", got.len());
        from.receive_by(8, &mut |_| ()).unwrap();
        from.flush(crate::testing::no_failure);
        to.receive_by(200, &mut |d| got.push(d.payload[0])).unwrap();
    }
    assert_eq!(got, (0..100).collect::<Vec<u8>>());
}
