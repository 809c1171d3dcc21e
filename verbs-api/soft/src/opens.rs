//! The devices in software that this process has open. A process that opens one again gets another
//! context of it, as with hardware: only one port can have an address.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};
use rocinante_netdev::OfProcess;

use super::Hca;
use crate::model::error::VerbsError;

/// The identity of a device: an interface of a network namespace, with some of its addresses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Device and inode of the network namespace.
    namespace: (u64, u64),
    interface: u32,
    addresses: Vec<IpAddr>,
    /// Whether these are all of the interface, as it was then.
    are_all: bool,
}

impl Key {
    /// The device over an interface of this thread's network namespace. `None` without `/proc`:
    /// such a device is not shared.
    pub fn new(interface: u32, addresses: &[IpAddr], are_all: bool) -> Option<Self> {
        let namespace = std::fs::metadata("/proc/thread-self/ns/net").ok()?;
        let mut addresses = addresses.to_vec();
        addresses.sort_unstable();
        Some(Self { namespace: (namespace.dev(), namespace.ino()), interface, addresses, are_all })
    }
}

impl Key {
    fn of_same_interface(&self, other: &Self) -> bool {
        (self.namespace, self.interface) == (other.namespace, other.interface)
    }

    /// Whether both want the port of an address.
    fn overlaps(&self, other: &Self) -> bool {
        self.of_same_interface(other)
            && self.addresses.iter().any(|address| other.addresses.contains(address))
    }

    /// Whether both are one device. All addresses are those that the interface had when the device
    /// was opened: some may have come since.
    fn is(&self, other: &Self) -> bool {
        self.of_same_interface(other)
            && (self.addresses == other.addresses || self.are_all && other.are_all)
    }
}

fn words(addresses: &[IpAddr]) -> String {
    addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
}

/// The devices of a process.
#[derive(Debug, Default)]
struct Table {
    /// Those that are open. An entry that points to nothing is being opened or closed.
    open: Mutex<BTreeMap<Key, Weak<Hca>>>,
    /// An entry has changed.
    changed: Condvar,
}

static TABLE: OfProcess<Table> = OfProcess::none();

/// The entry of a device. The device drops it last, when its port is closed.
#[derive(Debug)]
pub struct Claim {
    key: Key,
    of: &'static Table,
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A child of fork(2) drops a copy, which is of its parent's table.
        if TABLE.own().is_some_and(|own| std::ptr::eq(own, self.of)) {
            self.of.open.lock().remove(&self.key);
            self.of.changed.notify_all();
        }
    }
}

/// The device `key` if it is open and `suits`, or else the one that `start` starts. Error: those of
/// `suits` and of `start`; a device with some of these addresses is open, or this one is broken.
pub fn open(
    key: Option<Key>,
    suits: impl FnOnce(&Hca) -> Result<(), VerbsError>,
    start: impl FnOnce(Option<Claim>) -> Result<Arc<Hca>, VerbsError>,
) -> Result<Arc<Hca>, VerbsError> {
    let Some(key) = key else { return start(None) };
    let of = TABLE.get();
    let mut open = of.open.lock();
    while let Some((_, entry)) = open.iter().find(|(other, _)| other.is(&key)) {
        let Some(hca) = entry.upgrade() else {
            of.changed.wait(&mut open);
            continue;
        };
        // The device may be dropped from here on, which takes the lock.
        drop(open);
        if hca.is_broken() {
            return Err(VerbsError::Busy(
                "the interface is gone: close all contexts of the device",
            ));
        }
        return suits(&hca).map(|()| hca);
    }
    if let Some(other) = open.keys().find(|other| other.overlaps(&key)) {
        return Err(VerbsError::Invalid(format!(
            "{} of this interface is open in this process, with other addresses: open the same \
             addresses, or close it first",
            words(&other.addresses)
        )));
    }
    open.insert(key.clone(), Weak::new());
    drop(open);
    let hca = start(Some(Claim { key: key.clone(), of }))?;
    of.open.lock().insert(key, Arc::downgrade(&hca));
    of.changed.notify_all();
    Ok(hca)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Works while no other thread can open a device.
    pub(crate) fn held<T>(work: impl FnOnce() -> T) -> T {
        let _open = TABLE.get().open.lock();
        work()
    }

    fn key(interface: u32, address: &str, are_all: bool) -> Key {
        Key::new(interface, &[address.parse().unwrap()], are_all).unwrap()
    }

    /// Each interface has link-local addresses, and each namespace its own of all kinds.
    #[test]
    fn one_address_on_two_interfaces_or_in_two_namespaces_is_of_two_devices() {
        for address in ["10.0.0.1", "fd00::1", "fe80::1"] {
            let one = key(1, address, true);
            let elsewhere = Key { namespace: (0, 0), ..one.clone() };
            for other in [key(2, address, true), elsewhere] {
                assert!(!one.overlaps(&other) && !one.is(&other), "{one:?}, {other:?}");
            }
            let part = key(1, address, false);
            assert!(one.overlaps(&part) && one.is(&part));
        }
        let (part, other) = (key(1, "fe80::1", false), key(1, "fe80::2", false));
        assert!(!part.overlaps(&other) && !part.is(&other));
    }

    /// The end of a device wakes those that wait for it, and not those that wait for another.
    #[test]
    fn a_device_that_could_not_be_opened_is_opened_by_who_waits_for_it() {
        use std::sync::mpsc::channel;
        use std::time::Duration;

        let keys = [1, 2].map(|nth| Key { namespace: (0, 7), ..key(nth, "10.0.0.1", true) });
        let refused = || VerbsError::Busy("on purpose");
        std::thread::scope(|scope| {
            let begin = |key: &Key| {
                let (key, (begun, begins)) = (key.clone(), channel());
                let (end, ends) = channel::<()>();
                scope.spawn(move || {
                    let start = |_claim| {
                        begun.send(()).unwrap();
                        let _ = ends.recv();
                        Err(refused())
                    };
                    open(Some(key), |_| Ok(()), start).unwrap_err();
                });
                begins.recv().unwrap();
                end
            };
            let ends = keys.each_ref().map(begin);
            // The second is waited for first.
            let waiting = [1, 0].map(|nth| {
                let (key, (done, is_done)) = (keys[nth].clone(), channel());
                scope.spawn(move || {
                    open(Some(key), |_| Ok(()), |_| Err(refused())).unwrap_err();
                    let _ = done.send(());
                });
                std::thread::sleep(Duration::from_millis(50));
                is_done
            });
            let [first, second] = ends;
            drop(first);
            let heard = waiting[1].recv_timeout(Duration::from_secs(20));
            drop(second);
            waiting[0].recv().unwrap();
            // Without this the scope would wait for ever.
            TABLE.get().changed.notify_all();
            heard.expect("the first is opened anew");
        });
    }
}
