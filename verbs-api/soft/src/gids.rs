//! The GID table of a context, and the port that it follows.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use parking_lot::Mutex;
use rocinante_netdev::{Interface, InterfaceWatch, follow_gids};

use crate::model::event::AsyncEvent;
use crate::provider::wake;
use crate::provider::worker::Worker;

/// A table of GIDs ([`follow_gids`] says how it changes).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidTable {
    entries: Vec<Option<IpAddr>>,
    /// The only addresses that it may have, by index; without them, all of the interface.
    only: Option<Vec<IpAddr>>,
}

impl GidTable {
    /// A table of these addresses, which are all of the interface or only some.
    pub fn new(addresses: &[IpAddr], are_all: bool) -> Self {
        let only = (!are_all).then(|| addresses.to_vec());
        Self { entries: addresses.iter().copied().map(Some).collect(), only }
    }

    /// Follows the interface's addresses. Returns whether an entry has changed.
    fn follow(&mut self, interface: Option<&Interface>) -> bool {
        let before = self.entries.clone();
        if let Some(only) = &self.only {
            let has = |address| interface.is_some_and(|interface| interface.has(address));
            self.entries = only.iter().map(|address| Some(*address).filter(|a| has(*a))).collect();
            return self.entries != before;
        }
        let addresses = interface.map(|interface| interface.addresses.as_slice()).unwrap_or(&[]);
        follow_gids(&mut self.entries, addresses);
        self.entries != before
    }
}

/// The port of a context, which threads look at.
#[derive(Debug)]
pub(super) struct Followed {
    following: Mutex<Following>,
    /// Readable while there are events, or announcements to look at.
    both: OwnedFd,
    /// Looks at announcements as long as tasks wait for events.
    thread: Mutex<Option<Worker>>,
}

impl Followed {
    /// Follows the interface with this index, for a context whose events make `events` readable.
    pub(super) fn open(index: u32, table: GidTable, events: BorrowedFd<'_>) -> io::Result<Self> {
        let following = Following::open(index, table)?;
        let both = wake::any_of(&[events, following.as_fd()])?;
        Ok(Self { following: Mutex::new(following), both, thread: Mutex::default() })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.both.as_fd()
    }

    pub(super) fn gids(&self) -> Vec<Option<IpAddr>> {
        self.following.lock().state.table.entries.clone()
    }

    /// Takes over the places that another context's addresses have.
    pub(super) fn take_places(&self, gids: &[Option<IpAddr>]) {
        let mut following = self.following.lock();
        let Following { watch, state: State { table, .. } } = &mut *following;
        if table.only.is_none() {
            table.entries = gids.to_vec();
            table.follow(watch.interface());
        }
    }

    /// Hands new events to `each`.
    pub(super) fn look(&self, each: impl FnMut(AsyncEvent)) {
        self.following.lock().look(each);
    }

    /// Has a thread call `look` whenever there is news, until it returns false. It is one thread,
    /// however often this is called.
    pub(super) fn look_on(&self, look: impl Fn() -> bool + Send + 'static) -> io::Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let news = wake::apart(self.following.lock().as_fd().try_clone_to_owned()?);
            let work = move |stop: &OwnedFd| {
                while !wake::take(stop) {
                    wake::wait(Some((news.as_fd(), false)), stop.as_fd(), None);
                    if !look() {
                        return;
                    }
                }
            };
            *thread = Some(Worker::start("roce-events".to_owned(), work)?);
        }
        Ok(())
    }
}

/// The port, which the kernel announces changes of.
#[derive(Debug)]
struct Following {
    watch: InterfaceWatch,
    state: State,
}

/// The port as it was at the last look.
#[derive(Debug)]
struct State {
    table: GidTable,
    up: bool,
    /// The interface is gone, which was reported.
    gone: bool,
}

impl Following {
    /// Follows the interface with this index.
    fn open(index: u32, table: GidTable) -> io::Result<Self> {
        let watch = InterfaceWatch::open(index)?;
        let up = watch.interface().is_some_and(|interface| interface.up);
        let mut state = State { table, up, gone: false };
        // An address of before may be gone.
        state.table.follow(watch.interface());
        Ok(Self { watch, state })
    }

    /// Looks at the port if the kernel announced a change. Hands new events to `each`.
    fn look(&mut self, each: impl FnMut(AsyncEvent)) {
        if self.watch.look() && !self.state.gone {
            self.state.follow(self.watch.interface(), each);
        }
    }
}

impl State {
    /// Takes the interface over as it is now. Hands new events to `each`.
    fn follow(&mut self, interface: Option<&Interface>, mut each: impl FnMut(AsyncEvent)) {
        self.gone = interface.is_none();
        let up = interface.is_some_and(|interface| interface.up);
        let was_up = std::mem::replace(&mut self.up, up);
        let moved = self.table.follow(interface);
        if self.gone {
            return each(AsyncEvent::DeviceFatal);
        }
        if was_up != up {
            each(if up { AsyncEvent::PortActive } else { AsyncEvent::PortErr });
        }
        if moved {
            each(AsyncEvent::GidChange);
        }
    }
}

impl AsFd for Following {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn interface(addresses: &[u8]) -> Interface {
        Interface {
            name: "x".into(),
            index: 1,
            mtu: 1500,
            mac: [2; 6],
            up: true,
            loopback: false,
            addresses: addresses.iter().map(|last| (ip(*last), 24)).collect(),
        }
    }

    #[test]
    fn indices_stay_and_an_address_takes_the_first_hole() {
        let mut table = GidTable::new(&[ip(1), ip(2), ip(3)], true);
        for (addresses, entries, changed) in [
            (&[1, 2, 3][..], &[1, 2, 3][..], false),
            (&[3, 2, 1], &[1, 2, 3], false),
            (&[2], &[0, 2, 0], true),
            (&[2, 4], &[4, 2, 0], true),
            (&[1, 2, 4, 5], &[4, 2, 1, 5], true),
            (&[], &[0, 0, 0, 0], true),
            (&[9], &[9, 0, 0, 0], true),
        ] {
            assert_eq!(table.follow(Some(&interface(addresses))), changed, "{addresses:?}");
            let expected = entries.iter().map(|last| Some(*last).filter(|l| *l != 0).map(ip));
            assert_eq!(table.entries, expected.collect::<Vec<_>>(), "{addresses:?}");
        }
        assert!(table.follow(None) && table.entries == [None; 4]);
    }

    /// Whatever changed since the last look, each change is an event.
    #[test]
    fn changes_that_come_together_are_all_reported() {
        use AsyncEvent::{DeviceFatal, GidChange, PortActive, PortErr};
        let mut state = State { table: GidTable::new(&[ip(1)], true), up: true, gone: false };
        for (up, addresses, events) in [
            (true, &[1][..], &[][..]),
            (false, &[1], &[PortErr]),
            (true, &[1, 2], &[PortActive, GidChange]),
            (true, &[2], &[GidChange]),
            (false, &[], &[PortErr, GidChange]),
        ] {
            let mut told = Vec::new();
            let now = Interface { up, ..interface(addresses) };
            state.follow(Some(&now), |event| told.push(event));
            assert_eq!(told, events, "{addresses:?}");
        }
        let mut told = Vec::new();
        state.follow(None, |event| told.push(event));
        assert_eq!((told, state.gone), (vec![DeviceFatal], true));
    }

    #[test]
    fn a_table_of_some_addresses_takes_no_others() {
        let mut table = GidTable::new(&[ip(2), ip(1)], false);
        for (addresses, entries, changed) in [
            (&[1, 2, 3][..], [Some(ip(2)), Some(ip(1))], false),
            (&[1, 3], [None, Some(ip(1))], true),
            (&[2, 3], [Some(ip(2)), None], true),
        ] {
            assert_eq!(table.follow(Some(&interface(addresses))), changed);
            assert_eq!(table.entries, entries);
        }
    }

    /// Another context may have been opened while there were other addresses.
    #[test]
    fn places_are_taken_over_of_addresses_that_are_there() {
        let lo = Interface::by_name("lo").unwrap();
        let own = IpAddr::from([127, 0, 0, 1]);
        let places = [ip(1), own, ip(2)].map(Some);
        for (are_all, expected) in [(true, None), (false, Some(vec![Some(own)]))] {
            let events = wake::eventfd().unwrap();
            let table = GidTable::new(&[own], are_all);
            let followed = Followed::open(lo.index, table, events.as_fd()).unwrap();
            followed.take_places(&places);
            let gids = followed.gids();
            match expected {
                Some(expected) => assert_eq!(gids, expected),
                None => assert_eq!((gids[1], gids.contains(&Some(ip(1)))), (Some(own), false)),
            }
        }
    }
}
