//! Acknowledgements that wait for the program's next call, or for the peer to ask, sent at the
//! program's exit.
//!
//! Dropping an object sends its held acknowledgements. A program that returns from `main` or calls
//! `exit(3)` without dropping its objects runs the function that this module registers. A program
//! that ends by `_exit(2)` or a signal runs nothing more, unless a preloaded library intercepts the
//! former (`verbs-api/capi/paths`).

#![allow(unsafe_code)]

use std::sync::{Arc, Weak};

use super::Hca;
use super::shard::Shard;
use crate::provider::sync::{AtomicU32, Instant, Mutex, OnceLock, Ordering, yield_now};
use crate::tuning::shard::EXIT_PATIENCE;

/// The devices of this process.
static DEVICES: Mutex<Vec<Weak<Hca>>> = Mutex::new(Vec::new());
/// The process whose devices these are, or 0. A child of fork(2) has those of its parent until it
/// starts one of its own.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Sends what `device` holds back when the program exits.
pub(super) fn watch(device: &Arc<Hca>) {
    // A child of fork(2) has its parent's registration, too.
    static REGISTERED: OnceLock<()> = OnceLock::new();
    REGISTERED.get_or_init(register);
    let (own, mut devices) = (std::process::id(), DEVICES.lock());
    if OWNER.swap(own, Ordering::Relaxed) != own {
        devices.clear();
    }
    devices.retain(|device| device.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

#[cfg(not(miri))]
fn register() {
    // SAFETY: the function is one of this library, which outlives it: exit(3) runs it, or
    // dlclose(3) before it unmaps the library. It does not unwind.
    let full = unsafe { libc::atexit(send_held) };
    // Without room the program ends as if by _exit(2).
    debug_assert_eq!(full, 0);
}

/// Miri knows no atexit(3).
#[cfg(miri)]
fn register() {
    let _: extern "C" fn() = send_held;
}

/// Sends held acknowledgements at `_exit(2)`. A signal handler may call that, or a child of
/// `vfork(2)`: so it only tries for locks, and gives none back.
pub extern "C" fn send_held_at_once() {
    if OWNER.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let Some(devices) = DEVICES.try_lock() else { return };
    for device in devices.iter().filter_map(Weak::upgrade) {
        for core in device.shards.all() {
            // The background thread may have it for a moment, or the thread that a signal
            // interrupted.
            let until = Instant::now() + EXIT_PATIENCE;
            let mut lock = core.shard.try_lock();
            while lock.is_none() && Instant::now() < until {
                yield_now();
                lock = core.shard.try_lock();
            }
            if let Some(mut shard) = lock {
                leave(&mut shard, until);
                std::mem::forget(shard);
            }
        }
        std::mem::forget(device);
    }
    std::mem::forget(devices);
}

extern "C" fn send_held() {
    // A child of fork(2) has copies of its parent's devices. The parent sends for them.
    if OWNER.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let Some(devices) = DEVICES.try_lock_for(EXIT_PATIENCE) else { return };
    for device in devices.iter().filter_map(Weak::upgrade) {
        for core in device.shards.all() {
            if let Some(mut shard) = core.shard.try_lock_for(EXIT_PATIENCE) {
                leave(&mut shard, Instant::now() + EXIT_PATIENCE);
            }
        }
        // Leaks the device, so that the exit does not wait for its threads.
        std::mem::forget(device);
    }
}

/// Sends everything of a shard that may leave. Until then it waits for room in the socket.
fn leave(shard: &mut Shard, until: Instant) {
    shard.send_last(None);
    while shard.has_to_send() && Instant::now() < until {
        yield_now();
        shard.send_waiting();
    }
    shard.let_go();
    shard.publish_all();
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use rocinante_netdev::sim::{SimConfig, SimNet};
    use rocinante_netdev::{AnyPort, PathSpec, Port as _};
    use rocinante_stack::{Engine, EngineConfig};

    use super::*;
    use crate::host::Host;
    use crate::router::Router;

    #[test]
    fn a_device_whose_port_is_full_leaves_once_there_is_room() {
        let [local, remote] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let net = SimNet::new();
        let (port, gate) = net.gated_port(&[local], &SimConfig::default()).unwrap();
        let (engine, router) = (Engine::new(EngineConfig::default()), Router::new(None, None));
        let mut shard = Shard::new("test", engine, AnyPort::from(port), Host::new(1), router);
        let (src_port, tos, ttl, flow_label) = (0xc000, 0, 64, 0);
        let spec = PathSpec { local, remote, src_port, tos, ttl, flow_label };
        let path = shard.io.port.add_path(&spec).unwrap().id;
        gate.shut();
        shard.io.port.reserve(path, 24).unwrap().buf.fill(0);
        shard.io.port.commit();
        shard.io.flush();
        leave(&mut shard, Instant::now());
        assert!(shard.has_to_send());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                gate.open();
            });
            leave(&mut shard, Instant::now() + Duration::from_secs(60));
        });
        assert!(!shard.has_to_send());
    }
}
