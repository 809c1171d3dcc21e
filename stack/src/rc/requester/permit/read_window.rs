//! The READ window, and the requests into which a READ is cut.
//!
//! The first and the last packet of a response are longer than those between by an AETH. A port
//! sends packets of equal size as one run, of which only the last may be shorter. If each request
//! asks for three packets more than full runs have, the responses to successive requests leave as
//! full runs, and between them as short runs of three: the last packet of one response and the
//! first two of the next. The more full runs a request asks for, the less the short one matters.

use crate::peer::Peers;
use crate::qp::sq::OVERHEAD;
use crate::tuning::read_window::{
    CALM, ENABLED, FEW_BYTES, FEW_PACKETS, LEAST, PARTS, RUNS_MAX, UNDER_WAY,
};
use crate::types::Mtu;
use crate::wire::{ICRC_LEN, bth};

/// Packets of the short run.
const SHORT: u32 = 3;

/// Packets of each request of a READ that is posted now. If our own receive queue has room for
/// three requests of full runs, a request asks for full runs. Otherwise, and after recent losses of
/// responses, it asks for few; and since one request should be in flight while another is answered,
/// for no more than half of the room.
pub(in crate::rc::requester) fn request_packets(mtu: Mtu, peers: &Peers, flow: &ReadWindow) -> u16 {
    let each = mtu.bytes() + OVERHEAD;
    let room = match flow.whole {
        true => peers.answers(each),
        false => peers.answers_one_by_one(each),
    };
    let room = room.min(flow.packets());
    let run = peers.runs().packets_of(mtu.bytes() + (bth::LEN + ICRC_LEN) as u32);
    let runs = ((room / UNDER_WAY).saturating_sub(SHORT) / run).min(RUNS_MAX);
    let packets = match if flow.is_calm() { runs } else { 0 } {
        0 => few(mtu).min(room / 2).max(1),
        _ => SHORT + runs * run,
    };
    u16::try_from(packets).unwrap_or(u16::MAX)
}

fn few(mtu: Mtu) -> u32 {
    (FEW_BYTES / mtu.bytes()).min(FEW_PACKETS)
}

/// READ window in packets. It begins with the packets that any path is expected to hold. Grows by
/// one per packet of a response. A loss sets it to half of the packets in flight, and slows its
/// growth. Responses are not acknowledged, so no other limit keeps them from flooding a slow path,
/// on which all packets behind a loss are sent in vain. The response to one request comes at once,
/// and may be more than such a path holds, so requests are small there.
#[derive(Debug)]
pub(in crate::rc::requester) struct ReadWindow {
    /// In parts of a packet.
    allowed: u32,
    least: u32,
    /// The growth per packet of a response.
    gain: u32,
    /// The peer is a Rocinante, whose responses come as its other packets do, as super-packets or
    /// not. Those of a card, or of a kernel without them, come one by one.
    pub(super) whole: bool,
    /// Packets that came since some were lost, up to [`CALM`]. Those that were in flight then count
    /// from below 0.
    since: i32,
}

impl ReadWindow {
    /// The window of a queue with room for `room` packets that come one by one; `whole` if the peer
    /// is a Rocinante.
    pub(super) fn new(mtu: Mtu, room: u32, whole: bool) -> Self {
        let least = room.min(LEAST * few(mtu));
        Self { allowed: least.saturating_mul(PARTS), least, gain: PARTS, whole, since: CALM }
    }

    /// The peer turned out to be a Rocinante.
    pub(super) fn upgrade(&mut self) {
        self.whole = true;
    }

    fn packets(&self) -> u32 {
        if ENABLED { (self.allowed / PARTS).max(self.least) } else { u32::MAX }
    }

    /// Whether `packets` more may be requested while `under_way` are in flight.
    pub(super) fn allows(&self, under_way: u64, packets: u32) -> bool {
        under_way + u64::from(packets) <= u64::from(self.packets())
    }

    /// `packets` packets of responses came.
    #[inline]
    pub(in crate::rc::requester) fn came(&mut self, packets: u64) {
        let packets = u32::try_from(packets).unwrap_or(u32::MAX);
        self.allowed = self.allowed.saturating_add(packets.saturating_mul(self.gain));
        let packets = i32::try_from(packets).unwrap_or(i32::MAX);
        self.since = self.since.saturating_add(packets).min(CALM);
    }

    /// Whether nothing was lost lately.
    fn is_calm(&self) -> bool {
        self.since == CALM
    }

    /// Of `under_way` packets in flight, some are requested again.
    pub(in crate::rc::requester) fn lost(&mut self, under_way: u64) {
        let half = u32::try_from(under_way / 2).unwrap_or(u32::MAX);
        self.allowed = self.allowed.min(half.saturating_mul(PARTS));
        (self.gain, self.since) = (1, -i32::try_from(under_way).unwrap_or(i32::MAX));
    }

    /// Of `under_way` packets in flight, one came with a congestion mark. That counts as a loss
    /// which leaves the least, once for all that were in flight.
    pub(in crate::rc::requester) fn marked(&mut self, under_way: u64) {
        if self.since >= 0 {
            self.lost(under_way.max(2 * u64::from(self.least)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::types::QueueKind;

    fn cut(mtu: Mtu, peers: &Peers) -> u16 {
        let flow =
            ReadWindow { allowed: u32::MAX, least: 0, gain: PARTS, whole: true, since: CALM };
        request_packets(mtu, peers, &flow)
    }

    fn packets(mtu: Mtu, datagrams: u32) -> u16 {
        cut(
            mtu,
            &Peers::new(
                Budget { bytes: u32::MAX, datagrams },
                crate::tuning::long_runs::STABLE_PACKETS,
            ),
        )
    }

    #[test]
    fn requests_are_as_many_full_runs_as_there_is_room_for() {
        let room = [1, 2, 16, 30, 53, 54, 98, 99, 368, 369, 100_000];
        let cut = room.map(|datagrams| packets(Mtu::Mtu4096, datagrams));
        assert_eq!(cut, [1, 1, 8, 15, 15, 18, 18, 33, 108, 123, 123]);
        let cut = [48, 194, 195, 100_000].map(|datagrams| packets(Mtu::Mtu1024, datagrams));
        assert_eq!(cut, [24, 60, 65, 499]);
        assert_eq!(packets(Mtu::Mtu256, 100_000), 3 + 8 * 64);
    }

    #[test]
    fn bytes_limit_them_too() {
        let bytes = 369 * Budget::cost(4096 + OVERHEAD);
        let of_bytes = |bytes| {
            cut(
                Mtu::Mtu4096,
                &Peers::new(
                    Budget { bytes, datagrams: u32::MAX },
                    crate::tuning::long_runs::STABLE_PACKETS,
                ),
            )
        };
        assert_eq!([of_bytes(bytes), of_bytes(bytes - 1)], [123, 108]);
    }

    #[test]
    fn where_runs_arrive_whole_there_is_room_for_more_of_them() {
        let own = Budget { bytes: 10_000_000, datagrams: 48 };
        let mut peers =
            Peers::new(own, crate::tuning::long_runs::STABLE_PACKETS).of_kind(QueueKind::Places);
        assert_eq!(cut(Mtu::Mtu4096, &peers), 15);
        for _ in 0..100 {
            peers.arrived(2, 15, 0);
        }
        assert_eq!(cut(Mtu::Mtu4096, &peers), 78);
        let mut flow = ReadWindow::new(Mtu::Mtu4096, 1000, false);
        assert_eq!(request_packets(Mtu::Mtu4096, &peers, &flow), 15, "an unknown peer's");
        flow.upgrade();
        assert_eq!(request_packets(Mtu::Mtu4096, &peers, &flow), 78);
        for _ in 0..400 {
            peers.arrived(1, 1, 0);
        }
        assert_eq!(cut(Mtu::Mtu4096, &peers), 15);
    }

    #[test]
    fn what_is_lost_halves_what_is_under_way_down_to_what_it_always_was() {
        let peers = Peers::new(
            Budget { bytes: u32::MAX, datagrams: 1000 },
            crate::tuning::long_runs::STABLE_PACKETS,
        );
        let mut flow = ReadWindow::new(Mtu::Mtu4096, 48, true);
        assert!(flow.allows(33, 15) && !flow.allows(34, 15));
        assert_eq!(request_packets(Mtu::Mtu4096, &peers, &flow), 15);
        flow.came(752);
        assert!(flow.allows(700, 100) && !flow.allows(700, 101));
        assert_eq!(request_packets(Mtu::Mtu4096, &peers, &flow), 123);
        flow.lost(800);
        flow.came(640);
        assert!(flow.allows(310, 100) && !flow.allows(310, 101), "it grows slowly then");
        assert_eq!(request_packets(Mtu::Mtu4096, &peers, &flow), 15, "and is asked for in small");
        flow.lost(10);
        flow.lost(0);
        assert!(flow.allows(33, 15) && !flow.allows(34, 15));
        flow.came(u64::try_from(CALM).unwrap() - 1);
        assert_eq!(request_packets(Mtu::Mtu4096, &peers, &flow), 15);
        flow.came(1);
        assert_eq!(request_packets(Mtu::Mtu4096, &peers, &flow), 123, "which is forgotten");
        flow.came(u64::MAX);
        assert!(flow.allows(1 << 20, 1));
    }

    /// The marks of one window are one episode.
    #[test]
    fn a_mark_counts_as_a_loss_once_in_each_window() {
        let mut flow = ReadWindow::new(Mtu::Mtu4096, 48, true);
        flow.came(752);
        assert!(flow.allows(700, 100) && !flow.allows(700, 101));
        (0..9).for_each(|_| flow.marked(800));
        assert!(flow.allows(300, 100) && !flow.allows(300, 101));
        flow.came(799);
        flow.marked(400);
        assert!(flow.allows(312, 100) && !flow.allows(312, 101), "one of them is in flight");
        flow.came(1);
        flow.marked(400);
        assert!(flow.allows(100, 100) && !flow.allows(100, 101));
        // The last packet of all.
        flow.came(400);
        flow.marked(1);
        assert!(flow.allows(0, 48) && !flow.allows(0, 49));
    }

    #[test]
    fn a_large_queue_begins_with_sixteen_requests_of_few() {
        let flow = ReadWindow::new(Mtu::Mtu4096, 10_000, true);
        assert!(flow.allows(225, 15) && !flow.allows(226, 15));
    }
}
