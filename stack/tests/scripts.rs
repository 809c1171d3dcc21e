//! The scripts of `tests/scripts/`, played to our engine in virtual time: one test for each.

mod common;

use std::collections::VecDeque;

use common::{BASE, PD, PEER, Setup, Solo};
use rocinante_scripts::{Completion, Options, REGION, Range, Remote, SCRIPTS, Step, Subject, Talk};
use rocinante_stack::QpAttr;
use rocinante_stack::mem::{Access, PdId, Region, Sge};
use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{QpState, SendData, SendOp, SendWr};

/// Most deadlines in a row without a relevant event.
const DEADLINES: u32 = 1000;

/// An engine; a script is its peer.
struct Virtual {
    solo: Solo,
    /// Keys of the regions with their offsets in the arena, where they lie one behind the other.
    regions: Vec<(Key, usize)>,
    used: usize,
    said: VecDeque<Vec<u8>>,
}

impl Virtual {
    fn new() -> Self {
        let setup = Setup { arena: 4 * REGION, ..Setup::script() };
        let (regions, said) = (vec![], VecDeque::new());
        Self { solo: Solo::new(&setup), regions, used: 0, said }
    }

    fn place(&self, range: Range) -> std::ops::Range<usize> {
        let start = self.regions[range.region].1 + range.offset;
        start..start + range.len
    }

    fn elements(&self, ranges: &[Range]) -> Vec<Sge> {
        let element = |range: &Range| {
            let (lkey, addr) =
                (self.regions[range.region].0, BASE + self.place(*range).start as u64);
            Sge { addr, len: range.len as u32, lkey }
        };
        ranges.iter().map(element).collect()
    }

    /// Lets time pass until `found` returns something.
    fn wait<T>(&mut self, wait: bool, found: impl Fn(&mut Self) -> Option<T>) -> Option<T> {
        for _ in 0..DEADLINES {
            self.said.extend(self.solo.packets());
            if let Some(found) = found(self) {
                return Some(found);
            }
            if !wait {
                return None;
            }
            self.solo.wait_for_timer()?;
        }
        None
    }
}

impl Subject for Virtual {
    fn is_soft_roce(&self) -> bool {
        false
    }

    fn connect(&mut self, options: &Options) -> Step {
        let Options { mtu, psn, timeout, retry_cnt, rnr_retry, rd_atomic, access } = *options;
        let old = self.solo.setup.clone();
        let setup = Setup { mtu, psn, timeout, retry_cnt, rnr_retry, rd_atomic, access, ..old };
        self.modify(QpState::Reset)?;
        let end = &mut self.solo.end;
        end.connect(end.qpn, 0, PEER, &setup);
        end.host.completions.clear();
        self.said.clear();
        self.solo.setup = setup;
        Ok(())
    }

    fn qpn(&self) -> Qpn {
        self.solo.end.qpn
    }

    fn modify(&mut self, state: QpState) -> Step {
        let end = &mut self.solo.end;
        let attr = QpAttr { state: Some(state), ..QpAttr::default() };
        end.modify(end.qpn, &attr).map_err(|error| error.to_string())
    }

    fn state(&mut self) -> Step<QpState> {
        Ok(self.solo.state())
    }

    fn register(&mut self, len: usize, access: Access, foreign: bool) -> Step<Remote> {
        let (offset, pd) = (self.used, if foreign { PdId(PD.0 + 1) } else { PD });
        let (host, start) = (offset as u64, BASE + offset as u64);
        let region = Region { pd, start, len: len as u64, host, access };
        // As random as real keys: a former key does not come again at once.
        let random = 0x5eed_0000 + 0x0135_7900 * self.regions.len() as u32;
        let rkey = self.solo.end.host.regions.insert(region, random).expect("room");
        self.regions.push((rkey, offset));
        self.used += len;
        assert!(self.used <= self.solo.end.host.arena.len());
        Ok(Remote { address: start, rkey })
    }

    fn deregister(&mut self, region: usize) -> Step {
        let removed = self.solo.end.host.regions.remove(self.regions[region].0);
        removed.map(drop).ok_or_else(|| "no such region".into())
    }

    fn store(&mut self, region: usize, offset: usize, bytes: &[u8]) -> Step {
        let at = self.place(Range { region, offset, len: bytes.len() });
        self.solo.end.host.arena[at].copy_from_slice(bytes);
        Ok(())
    }

    fn load(&mut self, range: Range) -> Step<Vec<u8>> {
        Ok(self.solo.end.host.arena[self.place(range)].to_vec())
    }

    fn post_recv(&mut self, wr_id: u64, ranges: &[Range]) -> Step {
        let elements = self.elements(ranges);
        self.solo.try_recv(wr_id, &elements).map_err(|error| format!("{error:?}"))
    }

    fn post_send(&mut self, wr_id: u64, op: SendOp, ranges: &[Range], fence: bool) -> Step {
        let elements = self.elements(ranges);
        let mut wr = SendWr::new(op, SendData::Sges(&elements)).wr_id(wr_id);
        wr.fence = fence;
        self.solo.post_wr(&wr).map_err(|error| format!("{error:?}"))
    }

    fn completion(&mut self, wait: bool) -> Step<Option<Completion>> {
        let first = |this: &mut Self| {
            let all = &mut this.solo.end.host.completions;
            (!all.is_empty()).then(|| all.remove(0))
        };
        let found = self.wait(wait, first);
        Ok(found.map(|cqe| Completion {
            wr_id: cqe.wr_id,
            status: cqe.status.name().to_owned(),
            opcode: cqe.opcode,
            byte_len: cqe.byte_len,
            imm: cqe.imm,
        }))
    }

    fn receive(&mut self, mut packet: Vec<u8>, seal: bool) -> Step {
        if seal {
            common::seal(&mut packet);
        }
        self.solo.receive(&packet);
        Ok(())
    }

    fn say(&mut self, wait: bool) -> Step<Option<Vec<u8>>> {
        Ok(self.wait(wait, |this| this.said.pop_front()))
    }
}

fn play(name: &str) {
    let script = SCRIPTS.iter().find(|script| script.name == name).expect("a script");
    let mut subject = Virtual::new();
    let mut talk = Talk::new(&mut subject).expect("a region");
    assert_eq!((script.run)(&mut talk), Ok(()));
}

macro_rules! tests {
    ($($module:ident: $($name:ident),*;)*) => {
        $($(
            #[test]
            fn $name() {
                play(stringify!($name));
            }
        )*)*
    };
}

rocinante_scripts::each_script!(tests);
