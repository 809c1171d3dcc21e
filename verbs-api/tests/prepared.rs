//! A context that has opened nothing.

use std::net::UdpSocket;
use std::os::fd::AsRawFd as _;

use rocinante::device::{Backend, Limits};
use rocinante::{OpenOptions, Refused, VerbsError, doc};

fn udp() -> OpenOptions {
    OpenOptions::new().netdev(Backend::Udp)
}

/// Threads that drive devices over the loopback interface.
fn drivers() -> usize {
    let is_driver = |task: &std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        name.starts_with("roce-lo")
    };
    std::fs::read_dir("/proc/self/task").unwrap().flatten().filter(is_driver).count()
}

#[test]
fn nothing_is_open_before_it_is_opened() {
    let (here, other) = doc::addresses();
    let limits = Limits::default().max_qp(7).max_mr(5);
    let prepared = udp().limits(limits).shards(2).prepare(here).unwrap();
    let second = udp().prepare(other).unwrap();
    assert_eq!((prepared.name(), prepared.gids()), ("lo", &[here][..]));
    let attr = prepared.query_device();
    assert_eq!((attr.limits.max_qp, attr.limits.max_mw), (7, 5));
    assert!(!attr.windows.type_1 && attr.port.is_none());
    assert!(second.query_device().windows.type_1);
    assert!(prepared.poll_async_event().is_none());
    // The port is free, and no thread drives a device.
    let holder = UdpSocket::bind((here, 4791)).unwrap();
    assert_eq!(drivers(), 0);

    // Another context has the address: nothing is lost, and a later call succeeds.
    let fd = prepared.async_fd().as_raw_fd();
    let Refused { value: prepared, error } = prepared.open().unwrap_err();
    assert!(matches!(error, VerbsError::Open(_)), "{error}");
    drop(holder);
    let ctx = prepared.open().unwrap();
    assert_eq!(ctx.async_fd().as_raw_fd(), fd);
    let (now, before) = (ctx.query_device(), attr);
    assert_eq!(
        (now.limits, now.windows, now.optional, now.active_mtu),
        (before.limits, before.windows, before.optional, before.active_mtu)
    );
    assert!(now.port.is_some() && UdpSocket::bind((here, 4791)).is_err());
    assert_eq!(drivers(), 2);

    // The other is another device, and still not open.
    drop(UdpSocket::bind((other, 4791)).unwrap());
    let second = second.open().unwrap();
    assert_eq!((second.gids(), ctx.gids()), (&[other][..], &[here][..]));
}

#[test]
fn what_cannot_be_opened_is_refused_before() {
    let (here, _) = doc::addresses();
    for (options, words) in [
        (udp().cm_retries(16), "0 to 15 times"),
        (udp().shards(0), "1 to 64 shards"),
        (udp().shards(2).background(false), "background threads"),
        (udp().device("nothing0"), "nothing0"),
        (udp().device("lo"), "lo does not have the address"),
    ] {
        let at = if words.contains("has not") { [192, 0, 2, 1].into() } else { here };
        let error = options.prepare(at).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let none = udp().prepare([192, 0, 2, 1].into()).unwrap_err();
    assert!(matches!(none, VerbsError::NoDevice(_)), "{none}");
    let none = udp().prepare_interface("nothing0").unwrap_err();
    assert!(matches!(none, VerbsError::NoDevice(_)), "{none}");
    assert!(udp().prepare_interface("lo").unwrap().gids().contains(&[127, 0, 0, 1].into()));
}
