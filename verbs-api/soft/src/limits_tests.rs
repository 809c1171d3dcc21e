//! Limits of a device that follow from those of its ports, its queue and its settings.

use std::any::Any;
use std::sync::Arc;

use rocinante_netdev::handed::page::{Amounts, NO_LIMIT, RESOURCES};
use rocinante_netdev::sim::{SimConfig, SimNet};
use rocinante_netdev::{AnyPort, Backend, Port as _, PortConfig, Slots};
use rocinante_stack::cm::CmConfig;
use rocinante_stack::mem::{Access, Accessor, Bind, MwType};
use rocinante_stack::verbs::QpType;
use rocinante_stack::{Budget, RunLimits};

use super::Window;
use super::charge::Charge;
use super::device::advertised;
use super::neighbours_tests::neighbours;
use super::shards::run_limits;
use super::{Ah, Change, Cq, Device, Hca, Inbox, Pd, Qp, QpInitAttr, Registration, Settings, Srq};
use crate::model::device::Limits;
use crate::model::error::VerbsError;
use crate::model::qp::{PeerPath, QpCaps};
use crate::provider::memory::Range;

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
        fault: super::faults::FaultWish::default(),
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
    let net = SimNet::new();
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

/// A device that shares its address, and its slots.
pub(super) fn shared() -> (Arc<Hca>, Arc<Slots>) {
    let (here, [own, _]) = neighbours();
    let port = SimNet::new().port(&[here], &SimConfig::default()).unwrap();
    let (parts, why) = ((vec![AnyPort::from(port)], Some(own.clone())), (String::new(), None));
    (Hca::start(&settings(false), "sim", parts, why, None, None).unwrap(), own)
}

/// Each call that makes something, where the container may have no more of it, and once more.
#[test]
fn whatever_a_container_may_not_have_leaves_nothing() {
    struct World {
        device: Arc<Device>,
        pd: Pd,
        cq: Arc<Cq>,
        memory: [u64; 32],
    }
    type Make = fn(&World) -> Result<Box<dyn Any>, VerbsError>;
    fn boxed<T: 'static>(made: T) -> Box<dyn Any> {
        Box::new(made)
    }
    let range =
        |w: &World| Range { address: w.memory.as_ptr() as u64, len: size_of_val(&w.memory) };
    let makes: [(&str, Amounts, Make); 8] = [
        ("a context", [1, 0, 0], |w| {
            Device::new(w.device.hca().clone(), Arc::new(Inbox::new()?), true).map(boxed)
        }),
        ("a domain", [0, 1, 0], |w| {
            let pd = Pd::new(&w.device);
            pd.admitted().map(|()| boxed(pd))
        }),
        ("a queue", [0, 1, 0], |w| Cq::create(&w.device, 4, None).map(boxed)),
        ("a shared queue", [0, 1, 0], |w| Srq::create(&w.pd, 4, 1).map(boxed)),
        ("a window", [0, 1, 0], |w| Window::alloc(&w.pd, MwType::Type1).map(boxed)),
        ("a handle", [0, 1, 0], |w| {
            Ah::create(&w.pd, w.device.gids[0], &PeerPath::new([10, 9, 9, 9].into())).map(boxed)
        }),
        ("a region", [0, 1, 256], |w| {
            let range = Range { address: w.memory.as_ptr() as u64, len: 256 };
            Registration::insert(&w.pd, range, 0, Access::LOCAL_WRITE).map(boxed)
        }),
        ("a queue pair", [0, 1, 0], |w| {
            let attr = QpInitAttr {
                qp_type: QpType::Rc,
                send_cq: &w.cq,
                recv_cq: &w.cq,
                srq: None,
                caps: QpCaps::default(),
                sq_sig_all: false,
                context: 0,
                shard: None,
            };
            Qp::create(&w.pd, &attr).map(boxed)
        }),
    ];
    let (hca, own) = shared();
    let device = Device::new(hca, Arc::new(Inbox::new().unwrap()), true).unwrap();
    let (pd, cq) = (Pd::new(&device), Cq::create(&device, 4, None).unwrap());
    let world = World { device, pd, cq, memory: [0; 32] };
    let ledger = own.account().sit_alone().unwrap();
    let held = || (world.device.resources(), ledger.usage().current);
    let before = held();
    assert_eq!(before.1, [1, 2, 0]);
    for (what, amounts, make) in makes {
        for (nth, lacking) in amounts.iter().enumerate().filter(|(_, amount)| **amount > 0) {
            let mut limits = [NO_LIMIT; 3];
            limits[nth] = before.1[nth] + lacking - 1;
            ledger.limit(&limits);
            for _ in 0..3 {
                let refused = make(&world).map(drop).unwrap_err();
                assert!(matches!(refused, VerbsError::Quota { .. }), "{what}: {refused}");
                assert_eq!(held(), before, "{what}, {}", RESOURCES[nth]);
            }
            limits[nth] += 1;
            ledger.limit(&limits);
            for _ in 0..3 {
                let made = make(&world).unwrap_or_else(|error| panic!("{what}: {error}"));
                let sum = std::array::from_fn(|nth| before.1[nth] + amounts[nth]);
                assert_eq!(ledger.usage().current, sum, "{what}");
                make(&world).map(drop).unwrap_err();
                drop(made);
                assert_eq!(held(), before, "{what}");
            }
        }
    }
    // A region may grow as far as it may have been made.
    ledger.limit(&[NO_LIMIT, NO_LIMIT, 256]);
    let whole = range(&world);
    let part = Range { len: 160, ..whole };
    let mut region = Registration::insert(&world.pd, part, 0, Access::LOCAL_WRITE).unwrap();
    let access = Access::LOCAL_WRITE;
    for range in [whole, part, whole] {
        region.change(&Change { pd: None, range: Some(range), access }).unwrap();
        assert_eq!(ledger.usage().current[2], range.len as u64);
    }
    drop(region);
    assert_eq!(held(), before);
}

/// A window is bound to a region, or its container may have no more: what it is and what it is
/// charged with stay, and it may be changed once nothing is in the way.
#[test]
fn a_region_that_may_not_be_changed_is_charged_as_before() {
    let (hca, own) = shared();
    let device = Device::new(hca, Arc::new(Inbox::new().unwrap()), true).unwrap();
    let (pd, other) = (Pd::new(&device), Pd::new(&device));
    let ledger = own.account().sit_alone().unwrap();
    let memory = [0_u64; 32];
    let of = |len| Range { address: memory.as_ptr() as u64, len };
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let before = ledger.usage().current;
    let mut region = Registration::insert(&pd, of(160), 0, access).unwrap();
    let window = Window::alloc(&pd, MwType::Type1).unwrap();
    let (key, mw) = (region.key(), window.first_key());
    let bind = Bind { mw, rkey: mw, region: key, addr: 0, len: 8, access: Access::REMOTE_READ };
    let by = Accessor { pd: pd.id, qpn: Default::default() };
    device.shards.first().hold().host.regions.bind(by, &bind).unwrap();
    let changes = [256, 8, 160].map(|len| Change { pd: None, range: Some(of(len)), access });
    let apart = Change { pd: Some(&other), range: None, access };
    let held = ledger.usage().current;
    for change in changes.iter().chain([&apart]) {
        for _ in 0..2 {
            let refused = region.change(change).unwrap_err();
            assert!(matches!(refused, VerbsError::Busy(_)), "{change:?}: {refused}");
            assert_eq!((ledger.usage().current, region.key()), (held, key), "{change:?}");
        }
    }
    assert!(matches!(region.remove(true), Err(VerbsError::Busy(_))));
    drop(window);
    let held = ledger.usage().current;
    ledger.limit(&[NO_LIMIT, NO_LIMIT, 255]);
    for _ in 0..2 {
        let refused = region.change(&changes[0]).unwrap_err();
        assert!(matches!(refused, VerbsError::Quota { .. }), "{refused}");
        assert_eq!((ledger.usage().current, region.key()), (held, key));
    }
    ledger.limit(&[NO_LIMIT, NO_LIMIT, 256]);
    for change in changes.iter().chain([&apart]) {
        region.change(change).unwrap();
        let len = change.range.map_or(160, |range| range.len);
        assert_eq!(ledger.usage().current[2], len as u64, "{change:?}");
    }
    drop(region);
    assert_eq!(ledger.usage().current, before);
}

#[test]
fn a_region_that_changes_its_length_is_charged_with_its_last() {
    let (hca, own) = shared();
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
