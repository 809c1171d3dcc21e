//! Hosts with two shards: two engines behind one address, distinguished by the upper byte of a
//! queue pair's number. The lower halves of the numbers are the same in both, as far as possible.

use std::net::IpAddr;

use crate::check::Verdict;
use crate::mads::is_mad;
use crate::model::EndId;
use crate::network::{Event, Packet};
use crate::world::{Stage, World};

impl World<'_> {
    /// Gives some worlds a host with two shards: the first and the last of `hosts`.
    pub(crate) fn pair_shards(&mut self, addrs: &mut [IpAddr]) {
        let last = addrs.len() - 1;
        if last >= 2 && self.random.one_in(3) && self.has.policies.shards {
            addrs[last] = addrs[0];
            self.shard = Some(last);
        }
    }

    /// Gives the queue pairs of the second shard the lower halves of the first one's numbers.
    pub(crate) fn same_numbers(&mut self, ends_of: &[Vec<EndId>]) {
        let Some(second) = self.shard else { return };
        for (own, other) in ends_of[second].iter().zip(&ends_of[0]) {
            let low = self.ends[*other].low;
            (self.ends[*own].home, self.ends[*own].low) = (low, low);
        }
    }

    /// Whether the engine of a host has a connection manager: a second shard has none.
    pub(crate) fn has_manager(&self, host: usize) -> bool {
        self.shard != Some(host)
    }

    /// The number that the queue pair of an end has, or had last.
    pub(crate) fn number(&self, end: EndId) -> u32 {
        let slot = self.hosts[self.ends[end].host].config.qpn_slot;
        u32::from(slot) << 16 | self.ends[end].low
    }

    /// Whether a packet goes to the wrong shard first.
    pub(crate) fn misleads(&mut self, packet: &Packet) -> bool {
        let shared = self.shard.is_some_and(|shard| packet.to == 0 || packet.to == shard);
        let may = shared && !packet.misled && !packet.harmed && !is_mad(&packet.bytes);
        let may = may && self.has.faults.wrong_shard;
        may && self.stage == Stage::Storm && self.random.one_in(10)
    }

    /// The other shard gets a packet, which it must not accept. It forwards the packet, unless the
    /// mailbox is full.
    pub(crate) fn mislead(&mut self, mut packet: Packet) -> Verdict {
        let Some(shard) = self.shard else { return Ok(()) };
        self.tally.faults.wrong_shard += 1;
        let other = shard - packet.to;
        packet.misled = true;
        if !self.random.one_in(6) {
            let later = self.now + self.random.below(20_000);
            self.agenda.at(later, Event::Arrive(packet.clone()));
        }
        if self.hosts[other].stalled {
            return Ok(());
        }
        (packet.to, packet.dst, packet.harmed, packet.end) = (other, other, true, None);
        self.deliver(&packet)
    }
}
