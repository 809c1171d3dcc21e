//! Between the engine and its port: the paths by which packets leave, the ICRC of each packet, and
//! received datagrams.

use std::io;
use std::os::fd::BorrowedFd;

use rocinante_netdev::{AnyPort, PathId, PathSpec, Port, RxDatagram, RxIpId};
use rocinante_stack::types::Time;
use rocinante_stack::wire::icrc::{DF, IpFields, Summed, Template};
use rocinante_stack::{Datagram, IpId, TxSink};

use super::run_stats::RunStats;
use crate::tuning::shard::{PAUSE_MAX, PAUSE_MIN};

/// The port of a shard, as the sink of the engine.
pub(super) struct Io {
    pub(super) port: AnyPort,
    /// The ICRC templates of the paths, and the number of paths.
    templates: Vec<Option<Template>>,
    paths: usize,
    pub(super) run_stats: RunStats,
    /// Datagrams that were refused, and the last errno.
    refused: (u64, i32),
    /// The interface is gone.
    is_broken: bool,
    /// The interface is gone, or faults decide on received packets.
    is_unusual: bool,
    /// When the port's chores are to be looked at, if the shard is driven then; and when it must be
    /// for that.
    chores_at: Time,
    chores_by: Option<Time>,
}

impl Io {
    pub(super) fn new(port: AnyPort) -> Self {
        Self {
            port,
            templates: Vec::new(),
            paths: 0,
            run_stats: RunStats::default(),
            refused: (0, 0),
            is_broken: false,
            is_unusual: false,
            chores_at: Time(0),
            chores_by: None,
        }
    }

    /// Readable while the port has something, writable while it takes more.
    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.port.wait_fd()
    }

    /// Whether packets to send wait for the port to take more.
    #[inline]
    pub(super) fn wants_write(&self) -> bool {
        self.port.wants_write()
    }

    /// Turns the descriptor's reports of arrivals on or off.
    pub(super) fn watch(&mut self, wished: bool) -> io::Result<()> {
        self.port.watch(wished)
    }

    /// Has the port send its committed slots.
    pub(super) fn flush(&mut self) {
        let refused = &mut self.refused;
        self.port.flush(|failure| {
            refused.0 += u64::from(failure.datagrams);
            refused.1 = failure.errno;
        });
    }

    /// Registers a path. The port's chores are due then.
    pub(super) fn add_path(&mut self, spec: &PathSpec) -> io::Result<u32> {
        let path = self.port.add_path(spec)?;
        let ip = IpFields::between(spec.local, spec.remote);
        let ip = ip.ok_or(io::ErrorKind::InvalidInput)?;
        self.set_template(path.id, Some(Template::new(&ip, path.src_port)));
        (self.chores_at, self.chores_by) = (Time(0), Some(Time(0)));
        Ok(path.id.0)
    }

    pub(super) fn remove_path(&mut self, path: u32) {
        self.port.remove_path(PathId(path));
        self.set_template(PathId(path), None);
    }

    fn set_template(&mut self, id: PathId, template: Option<Template>) {
        let at = id.0 as usize;
        if self.templates.len() <= at {
            self.templates.resize(at + 1, None);
        }
        self.paths -= usize::from(self.templates[at].is_some());
        self.paths += usize::from(template.is_some());
        self.templates[at] = template;
    }

    /// Number of paths.
    pub(super) fn paths(&self) -> usize {
        self.paths
    }

    /// The port is good for nothing any more. Returns whether that is news.
    pub(super) fn break_down(&mut self) -> bool {
        self.is_unusual = true;
        !std::mem::replace(&mut self.is_broken, true)
    }

    /// Whether the interface is gone.
    #[inline]
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Lets faults decide on received packets.
    pub(super) fn judge(&mut self) {
        self.is_unusual = true;
    }

    /// Whether the interface is gone, or faults decide on received packets.
    #[inline]
    pub(super) fn is_unusual(&self) -> bool {
        self.is_unusual
    }

    /// Whether the chores are to be looked at.
    #[inline]
    pub(super) fn has_chores(&self, now: Time) -> bool {
        now >= self.chores_at
    }

    /// When the shard must be driven for them.
    #[inline]
    pub(super) fn chores_by(&self) -> Option<Time> {
        self.chores_by
    }

    /// Does the port's chores. Returns the nanoseconds until the next.
    pub(super) fn maintain(&mut self) -> Option<u64> {
        let pause = self.port.maintain();
        // A port whose interface is gone has nothing left to do.
        let pause = pause.filter(|_| !self.is_broken)?;
        Some(u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX).max(PAUSE_MIN))
    }

    /// All chores are done. `pause`: nanoseconds until the next that must be done.
    pub(super) fn rest(&mut self, now: Time, pause: Option<u64>) {
        self.chores_by = pause.map(|pause| now.after(pause));
        self.chores_at = now.after(pause.map_or(PAUSE_MAX, |pause| pause.min(PAUSE_MAX)));
    }

    /// Datagrams that were refused, and the last errno.
    pub(super) fn refused(&self) -> (u64, i32) {
        self.refused
    }
}

/// Seals each packet with the ICRC of the headers that the port will write.
impl TxSink for Io {
    #[inline]
    fn send<E>(
        &mut self,
        path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, E>,
    ) -> Result<bool, E> {
        let Some(Some(template)) = self.templates.get_mut(path as usize) else {
            // The path is gone, and a queue pair still names it. The packet is lost, as behind a
            // router that knows no way: a full sink would hold up all queue pairs.
            self.refused = (self.refused.0 + 1, libc::ENETUNREACH);
            return Ok(true);
        };
        let Some(slot) = self.port.reserve(PathId(path), len) else { return Ok(false) };
        let summed = fill(slot.buf)?;
        template.set_id(slot.ip_id, DF);
        template.seal_around(slot.buf, summed);
        self.port.commit();
        Ok(true)
    }
}

/// A datagram of the port, as the engine takes it.
#[inline]
pub(super) fn translate<'a>(datagram: &RxDatagram<'a>) -> Datagram<'a> {
    Datagram {
        bytes: datagram.payload,
        src: datagram.src,
        dst: datagram.dst,
        src_port: datagram.src_port,
        ip_id: match datagram.ip_id {
            RxIpId::Exact { id, flags } => IpId::Exact { id, flags },
            RxIpId::Hint(id) => IpId::Hint(id),
            RxIpId::None => IpId::None,
        },
        tos: datagram.tos.unwrap_or(0),
        hop_limit: None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use rocinante_netdev::sim::{SimConfig, SimNet};

    use super::*;

    /// The port looks up the route and the neighbour of a path among its chores.
    #[test]
    fn a_new_path_is_a_chore_and_a_path_that_is_gone_takes_packets_and_loses_them() {
        let [local, remote] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let port = SimNet::new().port(&[local], &SimConfig::default()).unwrap();
        let (mut io, now) = (Io::new(AnyPort::from(port)), Time(5_000_000_000));
        io.rest(now, None);
        assert!(!io.has_chores(now) && io.has_chores(now.after(PAUSE_MAX)));
        assert_eq!(io.chores_by(), None);
        let (src_port, tos, ttl, flow_label) = (0xc000, 0, 64, 0);
        let spec = PathSpec { local, remote, src_port, tos, ttl, flow_label };
        let path = io.add_path(&spec).unwrap();
        assert!(io.has_chores(now) && io.chores_by().is_some_and(|by| by <= now));
        let mut filled = 0;
        let mut send = |io: &mut Io| {
            let sent = io.send(path, 24, |out| {
                filled += 1;
                out.fill(0);
                Ok::<_, ()>(None)
            });
            (sent, io.paths(), io.refused(), filled)
        };
        assert_eq!(send(&mut io), (Ok(true), 1, (0, 0), 1));
        io.remove_path(path);
        assert_eq!(send(&mut io), (Ok(true), 0, (1, libc::ENETUNREACH), 1));
    }
}
