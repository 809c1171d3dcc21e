//! Acknowledgements that wait for the program's next call, or for the peer to ask, sent at the
//! program's exit.
//!
//! Dropping an object sends its held acknowledgements. A program that returns from `main` or calls
//! `exit(3)` without dropping its objects runs the function that this module registers. A program
//! that ends by `_exit(2)` or a signal runs nothing more, unless a preloaded library intercepts the
//! former (`verbs-api/capi/paths`).

#![allow(unsafe_code)]

use std::sync::{Arc, Weak};

use rocinante_netdev::OfProcess;

use super::Hca;
use super::shard::Shard;
use crate::provider::sync::{Instant, Mutex, OnceLock, yield_now};
use crate::tuning::shard::EXIT_PATIENCE;

/// The devices of this process.
static DEVICES: OfProcess<Mutex<Vec<Weak<Hca>>>> = OfProcess::none();

/// Sends what `device` holds back when the program exits.
pub(super) fn watch(device: &Arc<Hca>) {
    // A child of fork(2) has its parent's registration, too.
    static REGISTERED: OnceLock<()> = OnceLock::new();
    REGISTERED.get_or_init(register);
    let mut devices = DEVICES.get().lock();
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
    let Some(devices) = DEVICES.own().and_then(Mutex::try_lock) else { return };
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
    // The parent sends for the copies that a child of fork(2) has of its devices.
    let own = DEVICES.own().and_then(|devices| devices.try_lock_for(EXIT_PATIENCE));
    let Some(devices) = own else { return };
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

    /// What threads of the parent hold at the fork, they hold for ever. The program may have none:
    /// those of the library open and close devices, too.
    #[test]
    fn a_child_of_fork_opens_devices_while_threads_of_its_parent_do() {
        use crate::model::error::VerbsError;
        use crate::opens::{Key, open, tests::held};

        let key = || Key::new(7, &[IpAddr::from([10, 0, 0, 1])], true).unwrap();
        let opened = || open(Some(key()), |_| Ok(()), |_| Err(VerbsError::Busy("on purpose")));
        let status = held(|| {
            let _devices = DEVICES.get().lock();
            // SAFETY: the child allocates, which glibc permits, and ends: by an alarm if it waits.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::alarm(20);
                    send_held();
                    send_held_at_once();
                    let is_free = DEVICES.get().try_lock().is_some();
                    libc::_exit(i32::from(!is_free || opened().is_ok()));
                }
                let mut status = -1;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                status
            }
        });
        assert_eq!(status, 0);
    }

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
