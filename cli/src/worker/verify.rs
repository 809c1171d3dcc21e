//! Moves data by every operation, and compares every byte.

use rocinante::exchange::Exchange;
use rocinante::verbs::{Mtu, SendData, SendOp, Sge, WcOpcode};
use rocinante::{Mr, RecvWr, SendWr, Wc, WcStatus};

use super::plan::{Message, MessagePlan, Random};
use crate::measure::End;
use crate::messages::ByOp;

/// Fills the gaps between messages where they arrive.
const UNTOUCHED: u8 = 0xa5;
/// Fills the gaps between messages where they are sent from.
const NOT_SENT: u8 = 0x5a;
/// Requests outstanding.
const DEPTH: usize = 64;
/// Receives posted ahead.
const RECEIVES: usize = 256;
/// Number of executions of each atomic.
const ATOMICS: usize = 2048;
/// Number of words that they work on.
const WORDS: usize = 8;

/// The operations of [`Verifier::messages`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    WriteImm,
    Read,
}

/// Runs every operation from the side that is `first` to the other. Both sides call it. Returns the
/// bytes that this side compared. Error: the first failure or difference, as text.
pub(super) fn verify(
    end: End<'_>,
    exchange: &mut Exchange,
    first: bool,
    bytes_per_op: u64,
    seed: u64,
) -> Result<ByOp, String> {
    let mut verifier = Verifier { end, exchange, first, done: ByOp::default() };
    let kinds = [Kind::Send, Kind::Write, Kind::WriteImm, Kind::Read];
    for (kind, number) in kinds.into_iter().zip(1..) {
        let mut moved = 0;
        while moved < bytes_per_op {
            let seed = Random(seed ^ number ^ (moved << 8)).next();
            moved += verifier.messages(kind, seed, bytes_per_op - moved)?;
        }
    }
    verifier.fetch_add(seed)?;
    verifier.compare_swap(seed)?;
    Ok(verifier.done)
}

struct Verifier<'a> {
    end: End<'a>,
    exchange: &'a mut Exchange,
    first: bool,
    done: ByOp,
}

/// A request with its data.
struct CheckedRequest {
    op: SendOp,
    sges: [Sge; 2],
}

impl Verifier<'_> {
    /// Moves an area full of messages, or messages of `wanted` bytes. Returns their bytes.
    fn messages(&mut self, kind: Kind, seed: u64, wanted: u64) -> Result<u64, String> {
        let half = self.end.mr.len() / 2;
        let mtu = self.end.qp.query().1.path_mtu.map_or(0, Mtu::bytes);
        let plan = MessagePlan::new(seed, mtu as usize, half, wanted);
        let name = format!("{kind:?}");
        match (self.first, kind) {
            (true, Kind::Read) => {
                self.fill_landing();
                self.barrier("go")?;
                self.post(&name, plan.messages.len(), |this, i| this.read(plan.messages[i]))?;
                self.barrier("done")?;
                self.compare(&name, &plan)?;
                self.done.read += plan.bytes;
            }
            (true, _) => {
                self.end.mr.write(0, &plan.image(NOT_SENT));
                self.barrier("go")?;
                self.post(&name, plan.messages.len(), |this, i| {
                    this.outgoing(kind, i, plan.messages[i])
                })?;
                self.barrier("done")?;
            }
            (false, Kind::Read) => {
                self.end.mr.write(0, &plan.image(NOT_SENT));
                self.barrier("go")?;
                self.barrier("done")?;
            }
            (false, _) => {
                self.fill_landing();
                if kind == Kind::Write {
                    self.barrier("go")?;
                } else {
                    self.receive(kind, &plan)?;
                }
                self.barrier("done")?;
                self.compare(&name, &plan)?;
                match kind {
                    Kind::Send => self.done.send += plan.bytes,
                    Kind::Write => self.done.write += plan.bytes,
                    _ => self.done.write_imm += plan.bytes,
                }
            }
        }
        Ok(plan.bytes)
    }

    /// A SEND or WRITE of a message. Every third one has two SGEs.
    fn outgoing(&self, kind: Kind, number: usize, message: Message) -> CheckedRequest {
        let remote = self.end.remote;
        let at = remote.address + remote.len / 2 + message.offset as u64;
        let imm = Some(immediate(number));
        let op = match kind {
            Kind::Send => SendOp::Send { imm: imm.filter(|_| has_immediate(kind, number)) },
            Kind::Write => SendOp::Write { remote: at, rkey: remote.rkey, imm: None },
            _ => SendOp::Write { remote: at, rkey: remote.rkey, imm },
        };
        let cut = if number.is_multiple_of(3) { message.len / 3 } else { message.len };
        let data = self.end.mr;
        let sges =
            [data.sge(message.offset, cut), data.sge(message.offset + cut, message.len - cut)];
        CheckedRequest { op, sges }
    }

    fn read(&self, message: Message) -> CheckedRequest {
        let remote = self.end.remote;
        let op = SendOp::Read { remote: remote.address + message.offset as u64, rkey: remote.rkey };
        let (data, cut) = (self.end.mr, message.len / 2);
        let at = data.len() / 2 + message.offset;
        CheckedRequest { op, sges: [data.sge(at, cut), data.sge(at + cut, message.len - cut)] }
    }

    /// Receives all messages of the plan in order, and checks the length and immediate data of
    /// each.
    fn receive(&mut self, kind: Kind, plan: &MessagePlan) -> Result<(), String> {
        let count = plan.messages.len();
        for number in 0..count.min(RECEIVES) {
            self.post_receive(kind, number, plan)?;
        }
        self.barrier("go")?;
        let opcode = match kind {
            Kind::Send => WcOpcode::Recv,
            _ => WcOpcode::RecvRdmaWithImm,
        };
        for (number, message) in plan.messages.iter().enumerate() {
            let name = format!("the receive of {kind:?} number {number}");
            let wc = self.wait(&name)?;
            let imm = has_immediate(kind, number).then(|| immediate(number));
            let due = (number as u64, opcode, message.len as u64, imm);
            let is = (wc.wr_id, wc.opcode, u64::from(wc.byte_len), wc.imm);
            if is != due {
                return Err(format!(
                    "{name} has (wr_id, opcode, length, immediate) {is:?}, not {due:?}"
                ));
            }
            if number + RECEIVES < count {
                self.post_receive(kind, number + RECEIVES, plan)?;
            }
        }
        Ok(())
    }

    fn post_receive(&self, kind: Kind, number: usize, plan: &MessagePlan) -> Result<(), String> {
        let (data, message) = (self.end.mr, plan.messages[number]);
        let sges = [data.sge(data.len() / 2 + message.offset, message.len)];
        let sges = if kind == Kind::Send { &sges[..] } else { &[] };
        let wr = RecvWr { wr_id: number as u64, sges };
        self.end.qp.post_recv(&[wr]).map_err(|e| format!("receive {number}: {e}"))
    }

    /// Posts `count` requests, several at a time, and waits for all of them.
    fn post(
        &self,
        name: &str,
        count: usize,
        mut make: impl FnMut(&Self, usize) -> CheckedRequest,
    ) -> Result<(), String> {
        const LIST: usize = 8;
        const SIGNAL_EVERY: usize = 4;
        let (mut posted, mut completed) = (0, 0);
        while completed < count {
            while posted < count && posted - completed + LIST <= DEPTH {
                let numbers = posted..count.min(posted + LIST);
                let requests: Vec<_> =
                    numbers.clone().map(|number| (number, make(self, number))).collect();
                let list: Vec<_> = requests
                    .iter()
                    .map(|(number, request)| {
                        SendWr::new(request.op, SendData::Sges(&request.sges))
                            .wr_id(*number as u64)
                            .signaled(
                                (number + 1).is_multiple_of(SIGNAL_EVERY) || number + 1 == count,
                            )
                    })
                    .collect();
                self.end.qp.post_send(&list).map_err(|e| format!("posting {name}: {e}"))?;
                posted = numbers.end;
            }
            let wc = self.wait(&format!("{name} number {completed} to {}", posted - 1))?;
            let number = usize::try_from(wc.wr_id).unwrap_or(usize::MAX);
            if !(completed..posted).contains(&number) {
                return Err(format!("{name} number {number} completed, but {completed} was due"));
            }
            completed = number + 1;
        }
        Ok(())
    }

    /// Adds to b's words. Each result must be the sum of all earlier additions.
    fn fetch_add(&mut self, seed: u64) -> Result<(), String> {
        let mut model = [seed; WORDS];
        let mut random = Random(seed);
        let steps: Vec<_> = (0..ATOMICS)
            .map(|number| {
                let (word, add) = (number % WORDS, random.next());
                let found = model[word];
                model[word] = found.wrapping_add(add);
                Step { word, found, atomic: AtomicKind::Add(add) }
            })
            .collect();
        self.done.faa += self.atomics("FetchAdd", seed, &steps, &model)?;
        Ok(())
    }

    /// Compares and swaps b's words. Every third comparison must fail.
    fn compare_swap(&mut self, seed: u64) -> Result<(), String> {
        let mut model = [seed; WORDS];
        let mut random = Random(!seed);
        let steps: Vec<_> = (0..ATOMICS)
            .map(|number| {
                let (word, swap) = (number % WORDS, random.next());
                let found = model[word];
                let compare = if number % 3 == 2 { !found } else { found };
                if compare == found {
                    model[word] = swap;
                }
                Step { word, found, atomic: AtomicKind::Swap { compare, swap } }
            })
            .collect();
        self.done.cas += self.atomics("CompareSwap", seed, &steps, &model)?;
        Ok(())
    }

    /// Runs the steps on words that all start as `initial` and must end as `model`. Returns the
    /// bytes that this side compared.
    fn atomics(
        &mut self,
        name: &str,
        initial: u64,
        steps: &[Step],
        model: &[u64; WORDS],
    ) -> Result<u64, String> {
        let base = self.end.mr.len() / 2;
        let word = |data: &Mr, index: usize| data.load_u64(base + 8 * index);
        let store = |data: &Mr, index: usize, value: u64| {
            data.write(base + 8 * index, &value.to_ne_bytes());
        };
        if !self.first {
            (0..WORDS).for_each(|index| store(self.end.mr, index, initial));
            self.barrier("go")?;
            self.barrier("done")?;
            for (index, due) in model.iter().enumerate() {
                let is = word(self.end.mr, index);
                if is != *due {
                    return Err(format!("after {name}, word {index} is {is:#x}, not {due:#x}"));
                }
            }
            return Ok(8 * WORDS as u64);
        }
        self.barrier("go")?;
        self.post(name, steps.len(), |this, number| {
            let (step, region, data) = (&steps[number], this.end.remote, this.end.mr);
            let remote = region.address + region.len / 2 + 8 * step.word as u64;
            let rkey = region.rkey;
            let op = match step.atomic {
                AtomicKind::Add(add) => SendOp::FetchAdd { remote, rkey, add },
                AtomicKind::Swap { compare, swap } => {
                    SendOp::CompareSwap { remote, rkey, compare, swap }
                }
            };
            CheckedRequest { op, sges: [data.sge(base + 8 * number, 8), data.sge(base, 0)] }
        })?;
        self.barrier("done")?;
        for (number, step) in steps.iter().enumerate() {
            let (is, due) = (word(self.end.mr, number), step.found);
            if is != due {
                return Err(format!("{name} number {number} found {is:#x}, not {due:#x}"));
            }
        }
        Ok(8 * steps.len() as u64)
    }

    fn fill_landing(&self) {
        let half = self.end.mr.len() / 2;
        self.end.mr.write(half, &vec![UNTOUCHED; half]);
    }

    fn compare(&self, name: &str, plan: &MessagePlan) -> Result<(), String> {
        let half = self.end.mr.len() / 2;
        let area = self.end.mr.to_vec(half, half);
        plan.compare(&area, UNTOUCHED).map_err(|what| format!("{name}: wrong data: {what}"))
    }

    fn barrier(&mut self, name: &str) -> Result<(), String> {
        self.exchange.barrier(name).map_err(|e| e.to_string())
    }

    fn wait(&self, what: &str) -> Result<Wc, String> {
        let wc = self.end.cq.wait_one(self.end.patience).map_err(|e| format!("{what}: {e}"))?;
        if wc.status == WcStatus::Success {
            Ok(wc)
        } else {
            Err(format!("{what} ended in {}", wc.status))
        }
    }
}

/// One atomic: its word, and the value that it must find.
struct Step {
    word: usize,
    found: u64,
    atomic: AtomicKind,
}

enum AtomicKind {
    Add(u64),
    Swap { compare: u64, swap: u64 },
}

fn immediate(number: usize) -> [u8; 4] {
    (number as u32 ^ 0x5eed_0000).to_be_bytes()
}

/// Every second SEND has immediate data, and every WRITE with immediate does.
fn has_immediate(kind: Kind, number: usize) -> bool {
    kind == Kind::WriteImm || (kind == Kind::Send && !number.is_multiple_of(2))
}
