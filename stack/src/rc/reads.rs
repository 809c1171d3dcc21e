//! How a READ is cut into requests.
//!
//! The first and the last packet of an answer are longer than those between by an AETH, and a port sends as one run what is of equal size, of
//! which only the last may be shorter. So what leaves for requests that follow each other are short runs of three, the last packet of one
//! answer and the first two of the next, and between them full ones, if a request asks for three packets more than full runs have. The more full runs
//! it asks for, the less the short one matters.

use super::company::run;
use crate::pool::Pools;
use crate::qp::sq::OVERHEAD;
use crate::types::Mtu;
use crate::wire::{ICRC_LEN, bth};

/// The most bytes and packets of a request that is answered by less than a full run and three packets.
const FEW_BYTES: u32 = 61_440;
const FEW_PACKETS: u32 = 60;
/// Packets of the short run.
const SHORT: u32 = 3;
/// The most full runs of an answer: of nine super-packets eight are full then.
const RUNS_MAX: u32 = 8;
/// Requests for which there shall be room: while one is answered another is on its way, and the room of a third is being given back.
const UNDER_WAY: u32 = 3;

/// Packets of each request of a READ that is posted now: as many as our own receive queue has room for three times, as full runs; or else, since one should
/// be on its way while another is answered, no more than it has room for twice.
pub(super) fn request_packets(mtu: Mtu, pools: &Pools) -> u16 {
    let room = pools.answers(mtu.bytes() + OVERHEAD);
    #[allow(clippy::cast_possible_truncation)]
    let run = run(mtu.bytes() + (bth::LEN + ICRC_LEN) as u32);
    let runs = ((room / UNDER_WAY).saturating_sub(SHORT) / run).min(RUNS_MAX);
    let packets = match runs {
        0 => (FEW_BYTES / mtu.bytes()).min(FEW_PACKETS).min(room / 2).max(1),
        _ => SHORT + runs * run,
    };
    u16::try_from(packets).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Budget;

    fn packets(mtu: Mtu, datagrams: u32) -> u16 {
        request_packets(mtu, &Pools::new(Budget { bytes: u32::MAX, datagrams }))
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
        let cut = |bytes| {
            request_packets(Mtu::Mtu4096, &Pools::new(Budget { bytes, datagrams: u32::MAX }))
        };
        assert_eq!([cut(bytes), cut(bytes - 1)], [123, 108]);
    }

    #[test]
    fn where_runs_arrive_whole_there_is_room_for_more_of_them() {
        let mut pools = Pools::new(Budget { bytes: 10_000_000, datagrams: 48 });
        assert_eq!(request_packets(Mtu::Mtu4096, &pools), 15);
        for _ in 0..100 {
            pools.arrived(15, 2);
        }
        assert_eq!(request_packets(Mtu::Mtu4096, &pools), 78);
        for _ in 0..400 {
            pools.arrived(1, 1);
        }
        assert_eq!(request_packets(Mtu::Mtu4096, &pools), 15);
    }
}
