//! Limits of a device that follow from those of its ports, its queue and its settings.

use rocinante_netdev::sim::{SimConfig, SimNet};
use rocinante_netdev::{AnyPort, Backend, Port as _, PortConfig};
use rocinante_stack::cm::CmConfig;
use rocinante_stack::{Budget, RunLimits};

use super::charge::Charge;
use super::device::advertised;
use super::neighbours_tests::neighbours;
use super::shards::run_limits;
use super::{Hca, Settings};
use crate::model::device::Limits;

fn settings(background: bool) -> Settings {
    Settings {
        limits: Limits::default().max_qp(64).max_mr(64).max_mw(64),
        window_max: 512,
        advertise_credits: false,
        port: PortConfig::default(),
        cut_writes: true,
        recognises: false,
        cm_retries: None,
        keep_alive: std::time::Duration::ZERO,
        refuses_late: false,
        background,
        cpus: Vec::new(),
    }
}

#[test]
fn a_connection_manager_has_the_limits_of_its_device() {
    let of =
        |cm_retries| super::cm::config(&Settings { cm_retries, ..settings(false) }, None).unwrap();
    let usual = of(None);
    assert_eq!(usual.max_connections, 64);
    assert_eq!(usual.max_retries, CmConfig::default().max_retries);
    let other = of(Some(3));
    assert_eq!(other.max_retries, 3);
    assert!(usual.key != other.key && usual.ca_guid != other.ca_guid, "they are random");
}

/// The port tells how long runs are; without super-packets they are as long as elsewhere.
#[test]
fn the_longest_run_is_the_ports() {
    let net = SimNet::new(1);
    let longest = RunLimits::default();
    for (last, segments_max, packets) in [(1, 1, 64), (2, 8, 8), (3, 64, 64), (4, 200, 64)] {
        let config = SimConfig { segments_max, ..SimConfig::default() };
        let port = net.port(&[[10, 0, 0, last].into()], &config).unwrap();
        let runs = run_limits(port.capabilities());
        assert_eq!(runs.packets, packets, "{segments_max}");
        assert!(runs.bytes <= longest.bytes && runs.bytes > 65_000);
    }
}

#[test]
fn shards_announce_together_what_one_queue_holds_where_no_queue_is_theirs() {
    let queue = Budget { bytes: 1 << 20, datagrams: 1 << 10 };
    for (backend, shards, parts) in
        [(Backend::Udp, 4, (3, 4)), (Backend::Packet, 4, (3, 4)), (Backend::Xdp, 4, (3, 16))]
    {
        assert_eq!(advertised(queue, backend, shards), queue.part(parts.0, parts.1));
        assert_eq!(advertised(queue, backend, 1), queue.part(3, 4));
    }
}

#[test]
fn a_region_that_changes_its_length_is_charged_with_its_last() {
    let (here, [own, _]) = neighbours(9);
    let port = SimNet::new(1).port(&[here], &SimConfig::default()).unwrap();
    let (parts, why) = ((vec![AnyPort::from(port)], Some(own.clone())), (String::new(), None));
    let hca = Hca::start(&settings(false), "sim", parts, why, None).unwrap();
    own.account().charge(&[9, 9, 1 << 20]).unwrap();
    let held = || format!("{:?}", own.account());
    let before = held();
    let mut charge = Charge::region(&hca, 100).unwrap();
    for bytes in [300, 50, 0, 200] {
        let room = charge.room(bytes).unwrap();
        charge.resized(room, bytes);
        own.account().refund(&[0, 1, bytes as u64]);
        assert_eq!(held(), before, "{bytes}");
        own.account().charge(&[0, 1, bytes as u64]).unwrap();
    }
    drop(charge);
    assert_eq!(held(), before);
}
