//! Packets from an engine, through the network and into another.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::wire::icrc::{DF, IpFields, Summed, Template};
use rocinante_stack::{Datagram, Engine, IpId, TxSink, TxStop, Urgency};

use crate::check::{Context, Verdict};
use crate::mads::is_mad;
use crate::model::{EndId, peer};
use crate::network::Packet;
use crate::world::{Host, INBOX, PORT, Stage, World};

impl World<'_> {
    pub(crate) fn arrive(&mut self, packet: Packet) -> Verdict {
        self.tally.steps += 1;
        if self.misleads(&packet) {
            return self.mislead(packet);
        }
        let host = &mut self.hosts[packet.to];
        if host.stalled {
            if host.inbox.len() < INBOX || !self.has.faults.overflow {
                host.inbox.push_back(packet);
            } else {
                self.tally.faults.overflow += 1;
            }
            return Ok(());
        }
        self.deliver(&packet)
    }

    pub(crate) fn deliver(&mut self, packet: &Packet) -> Verdict {
        if packet.to != packet.dst && is_mad(&packet.bytes) {
            // Each host has a QP1, but accepts only packets addressed to it.
            return Ok(());
        }
        let fate = self.fate(packet);
        let due = self.foresee(packet)?;
        self.marked(packet);
        let (src, dst) = (self.hosts[packet.from].addr, self.hosts[packet.dst].addr);
        let host = &mut self.hosts[packet.to];
        let Some(engine) = &mut host.engine else { return Ok(()) };
        let ip_id = match src {
            IpAddr::V4(_) => IpId::Exact { id: packet.id, flags: DF },
            IpAddr::V6(_) => IpId::None,
        };
        let datagram = Datagram {
            bytes: &packet.bytes,
            src,
            dst,
            src_port: packet.port,
            ip_id,
            tos: packet.tos,
            hop_limit: Some(HOP_LIMIT),
        };
        host.taken += 1;
        self.tally.digest.add(self.now ^ (packet.bytes.len() as u64) << 44);
        if self.trace {
            eprintln!(
                "{:>12} at host {} for end {:?}: {}",
                self.now,
                packet.to,
                packet.end,
                describe(packet)
            );
        }
        engine.handle_datagram(Time(self.now), &datagram, &mut host.ram);
        host.gathered.add(engine, packet.bytes.len());
        self.settle(packet.to, Some(&Context::of(packet)))?;
        self.befell(packet, fate)?;
        self.fulfilled(packet, due)?;
        self.plan_transmit(packet.to);
        Ok(())
    }

    /// A host continues after a stall: first it takes the packets that arrived meanwhile.
    pub(crate) fn resume(&mut self, host: usize) -> Verdict {
        self.hosts[host].stalled = false;
        while let Some(packet) = self.hosts[host].inbox.pop_front() {
            self.deliver(&packet)?;
        }
        Ok(())
    }

    pub(crate) fn time_out(&mut self, host: usize) -> Verdict {
        self.tally.steps += 1;
        self.tally.digest.add(self.now);
        let now = Time(self.now);
        let Host { engine: Some(engine), ram, .. } = &mut self.hosts[host] else { return Ok(()) };
        engine.handle_timeout(now, ram);
        self.settle(host, None)?;
        self.plan_transmit(host);
        Ok(())
    }

    /// After a call of the engine of `host`, which may have packets to send.
    pub(crate) fn plan_transmit(&mut self, host: usize) {
        let soon = self.random.of(&[0, 0, 300, 3_000]);
        let soon = self.now + self.random.below(1 + soon);
        let host = &mut self.hosts[host];
        let writes = |engine: &mut Engine| {
            engine.has_probes() || engine.cm().is_some_and(|cm| cm.wants_transmit())
        };
        let wants = |engine: &mut Engine| engine.urgency() != Urgency::Idle || writes(engine);
        let wants = host.engine.as_mut().is_some_and(wants);
        if wants && host.tx_at.is_none() {
            host.tx_at = Some(soon.max(host.blocked_until));
        }
    }

    pub(crate) fn transmit(&mut self, at: usize) -> Verdict {
        self.tally.steps += 1;
        let now = self.now;
        let budget = 1 + self.random.index(100);
        let narrow = self.stage == Stage::Storm && self.has.faults.sink_full;
        let room = if narrow { self.random.index(60) } else { AMPLE };
        let addrs: Vec<IpAddr> = self.hosts.iter().map(|host| host.addr).collect();
        let host = &mut self.hosts[at];
        host.tx_at = None;
        let Some(engine) = &mut host.engine else { return Ok(()) };
        let mut sink = Sink { out: Vec::new(), room };
        let written = write_mads(engine, &addrs, &mut sink);
        let stop = match written {
            true => engine.poll_transmit(Time(now), budget, &mut host.ram, &mut sink).stop,
            false => TxStop::SinkFull,
        };
        if stop == TxStop::SinkFull && written && engine.urgency() == Urgency::Idle {
            return Err(format!("host {at} forgets packets for which the port had no room"));
        }
        // Datagrams without room go next time.
        let _ = send_probes(engine, &addrs, &mut sink);
        let bytes = sink.out.iter().map(|(_, packet)| packet.len()).sum();
        host.gathered.departed(engine, sink.out.len(), bytes);
        let again = match stop {
            TxStop::Idle => None,
            TxStop::Budget => Some(now + 1 + self.random.below(500)),
            TxStop::SinkFull => {
                self.tally.faults.sink_full += 1;
                let blocks = self.stage == Stage::Storm && self.random.one_in(8);
                let blocks = blocks && self.has.faults.block;
                self.tally.faults.block += u64::from(blocks);
                let wait = self.random.below(if blocks { 2_000_000 } else { 5_000 });
                host.blocked_until = now + 1 + wait;
                Some(host.blocked_until)
            }
        };
        self.hosts[at].tx_at = again;
        for (path, bytes) in sink.out {
            self.emit(at, path as usize, bytes)?;
        }
        self.settle(at, None)?;
        if stop == TxStop::Idle {
            self.owes_nothing(at)?;
        }
        self.plan_transmit(at);
        Ok(())
    }

    pub(crate) fn emit(&mut self, from: usize, to: usize, mut bytes: Vec<u8>) -> Verdict {
        self.letter_left(from, &bytes)?;
        self.notified(from, to, &bytes)?;
        self.request_left(from, to, &bytes)?;
        let host = &mut self.hosts[from];
        host.sent += 1;
        host.next_id = host.next_id.wrapping_add(1);
        let id = host.next_id;
        let template = &mut host.templates[to];
        template.set_id(id, DF);
        template.seal(&mut bytes);
        let qpn = Qpn::new(u32::from_be_bytes([0, bytes[5], bytes[6], bytes[7]]));
        let is_for = |end: &&EndId| self.ends[**end].low == qpn.value() & 0xffff;
        let end = self.hosts[to].ends.iter().find(is_for).copied();
        let generation = end.map_or(0, |end| self.ends[peer(end)].generation);
        let packet = Packet {
            bytes,
            from,
            to,
            dst: to,
            port: PORT,
            id,
            tos: 0,
            misled: false,
            harmed: false,
            end,
            generation,
        };
        self.tally.packets += 1;
        if let Some(tail) = packet.bytes.last_chunk::<4>() {
            self.tally.digest.add(u64::from(u32::from_le_bytes(*tail)) << 16 | from as u64);
        }
        if self.now < self.hosts[from].refusing_until {
            // The kernel refuses it, and nothing retransmits it.
            self.tally.faults.refused += 1;
            return Ok(());
        }
        let (faults, agenda) = (&mut self.tally.faults, &mut self.agenda);
        let lost = self.network.send(self.now, packet, &mut self.random, faults, agenda);
        self.tally.steps += lost;
        Ok(())
    }
}

/// Sends probes and replies of recognition. Returns whether all had room.
fn send_probes(engine: &mut Engine, addrs: &[IpAddr], sink: &mut Sink) -> bool {
    // A second shard has no QP1, and no other shard probes for it.
    while engine.poll_hand_off().is_some() {}
    while let Some(transmit) = engine.poll_probe() {
        if !engine.send_mad(&transmit.mad, path_to(transmit.remote, addrs), sink) {
            engine.put_back_probe(transmit);
            return false;
        }
    }
    true
}

fn path_to(remote: IpAddr, addrs: &[IpAddr]) -> u32 {
    let path = addrs.iter().position(|addr| *addr == remote);
    path.map_or(u32::MAX, |host| host as u32)
}

/// Sends the connection manager's messages. Returns whether all had room.
fn write_mads(engine: &mut Engine, addrs: &[IpAddr], sink: &mut Sink) -> bool {
    while let Some(transmit) = engine.cm().and_then(|cm| cm.poll_transmit()) {
        if !engine.send_mad(&transmit.mad, path_to(transmit.remote, addrs), sink) {
            if let Some(cm) = engine.cm() {
                cm.put_back(transmit);
            }
            return false;
        }
    }
    true
}

/// More packets than a host ever sends at once.
const AMPLE: usize = 200;

/// The hop limit of arriving packets.
pub(crate) const HOP_LIMIT: u8 = 61;

/// Takes the packets that leave an engine.
struct Sink {
    out: Vec<(u32, Vec<u8>)>,
    room: usize,
}

impl TxSink for Sink {
    fn send<E>(
        &mut self,
        path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, E>,
    ) -> Result<bool, E> {
        if self.out.len() >= self.room {
            return Ok(false);
        }
        // Bytes that the engine forgets to write show.
        let mut packet = vec![0xee; len];
        fill(&mut packet)?;
        self.out.push((path, packet));
        Ok(true)
    }
}

pub(crate) fn address(host: u64, v6: bool) -> IpAddr {
    let last = host as u8 + 1;
    if v6 {
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last)))
    } else {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }
}

pub(crate) fn template(src: IpAddr, dst: IpAddr) -> Template {
    let fields = IpFields::between(src, dst);
    Template::new(&fields.expect("all hosts of a world have addresses of one family"), PORT)
}

pub(crate) fn describe(packet: &Packet) -> String {
    use rocinante_stack::wire::Packet as Parsed;
    match Parsed::parse(&packet.bytes) {
        Ok(parsed) => format!(
            "{:?} psn {} ack_req {} {:?} {} bytes{}",
            parsed.info.operation,
            parsed.bth().psn,
            parsed.bth().ack_req,
            parsed.aeth(),
            parsed.payload().len(),
            if packet.harmed { " HARMED" } else { "" }
        ),
        Err(error) => format!("{error:?}"),
    }
}
