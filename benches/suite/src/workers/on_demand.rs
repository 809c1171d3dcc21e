//! Two processes of which the first sends messages when it is asked for them, one after the other.
//!
//! It says on its standard output that it is ready once the first message has arrived. Then each
//! line of its standard input is an [`Errand`], and it answers with a line: what it has [`Sent`].

use std::io::{BufRead as _, Read as _, Write as _};
use std::net::{IpAddr, TcpStream};
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rocinante::exchange::Exchange;
use rocinante::verbs::{Mtu, SendOp};
use rocinante::{ConnectOptions, Context, SendWr, WcStatus};
use rocinante_cli::measure::{Connected, Connecting, End, Side};
use rocinante_cli::output::{Failure, Result};
use rocinante_lab::ChildGuard;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::fan_in::{hear, now, say};
use super::job::{Device, Traffic, Work};
use super::ours::PATIENCE;
use super::pairs::{last_words, lines};
use super::peers;
use super::place::{Link, Places};

/// The most seconds for which it is used.
pub(super) const SECONDS_MAX: f64 = 30.0;
/// Bytes of the least region.
const REGION: usize = 4096;

/// Messages to send, and the longest time for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Errand {
    pub(crate) messages: u64,
    pub(crate) millis: u64,
}

/// The first message has arrived.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Of the sender and of the receiver. Empty over TCP.
    pub(crate) devices: Vec<Opened>,
    /// The time, in nanoseconds of the clock of [`now`].
    pub(crate) at: u64,
}

/// A device that a process opened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// The backend that it uses; `hw` for a device of the kernel.
    pub(crate) backend: String,
    /// The time that opening took, in milliseconds.
    pub(crate) ms: f64,
}

/// The result of an errand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sent {
    pub(crate) messages: u64,
    /// The longest time from sending a message until it was known to have arrived, in milliseconds.
    pub(crate) longest_ms: f64,
    /// Why the next message cannot be sent.
    pub(crate) error: Option<String>,
    /// When the last message had arrived, or failed.
    pub(crate) at: u64,
}

/// One process. The first one sends.
pub(super) fn run(
    ctx: Option<Context>,
    opened: Duration,
    side: Side,
    ends: (IpAddr, IpAddr),
    (mtu, size): (u32, usize),
    exchange: &mut Exchange,
) -> Result {
    let Some(ctx) = ctx else {
        let mut stream = peers::connect(side, ends, exchange)?;
        let mut bytes = vec![0x5a; size];
        return match side {
            Side::First => carry_out(Vec::new(), || over_tcp(&mut stream, &bytes)),
            Side::Second => answer(&mut stream, &mut bytes),
        };
    };
    let backend = ctx.backend().map_or_else(|| "hw".to_owned(), |backend| backend.to_string());
    let own = Opened { backend, ms: opened.as_secs_f64() * 1e3 };
    say(exchange, &own)?;
    let devices = vec![own, hear(exchange)?];
    let how = Connecting {
        options: ConnectOptions::default().mtu(Mtu::from_bytes(mtu)),
        qps: 1,
        sends: 1,
        receives: 1,
        elements: 1,
        inline: 0,
        completions: 2,
        half: size.max(REGION),
    };
    let connected = Connected::new(ctx, &how, exchange)?;
    if side == Side::First {
        let end = connected.end(PATIENCE);
        carry_out(devices, || write(&end, size))?;
    }
    // Until then the device's own thread answers.
    Ok(exchange.barrier("over")?)
}

/// Carries out errands until standard input ends, or a message fails.
fn carry_out(devices: Vec<Opened>, mut message: impl FnMut() -> Result<(), String>) -> Result {
    message().map_err(Failure::Failed)?;
    print(&Ready { devices, at: now() });
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(peers::failed("standard input"))?;
        let errand: Errand = serde_json::from_str(&line)
            .map_err(|_| Failure::Failed(format!("no errand on standard input: {line:?}")))?;
        let sent = errand.carry_out(&mut message);
        print(&sent);
        if let Some(why) = sent.error {
            return Err(Failure::Failed(why));
        }
    }
    Ok(())
}

impl Errand {
    fn carry_out(self, message: &mut impl FnMut() -> Result<(), String>) -> Sent {
        let begin = Instant::now();
        let mut sent = Sent { messages: 0, longest_ms: 0.0, error: None, at: 0 };
        while sent.messages < self.messages
            && sent.error.is_none()
            && begin.elapsed() < Duration::from_millis(self.millis)
        {
            let before = Instant::now();
            sent.error = message().err();
            sent.messages += u64::from(sent.error.is_none());
            sent.longest_ms = sent.longest_ms.max(before.elapsed().as_secs_f64() * 1e3);
        }
        sent.at = now();
        sent
    }
}

/// Sends one WRITE, and waits for its completion.
fn write(end: &End<'_>, size: usize) -> Result<(), String> {
    let op = SendOp::Write {
        remote: end.remote.address + end.remote.len / 2,
        rkey: end.remote.rkey,
        imm: None,
    };
    let in_words = |error: rocinante::VerbsError| error.to_string();
    let posted = end.qp.post_send(&[SendWr::new(op, &[end.mr.sge(0, size)]).wr_id(1)]);
    posted.map_err(|error| in_words(error.into()))?;
    match end.cq.wait_one(PATIENCE).map_err(in_words)?.status {
        WcStatus::Success => Ok(()),
        status => Err(status.to_string()),
    }
}

/// Sends one message, and waits for the byte that answers it.
fn over_tcp(stream: &mut TcpStream, bytes: &[u8]) -> Result<(), String> {
    let answered = stream.write_all(bytes).and_then(|()| stream.read_exact(&mut [0]));
    answered.map_err(|error| error.to_string())
}

/// Answers messages until the stream ends.
fn answer(stream: &mut TcpStream, bytes: &mut [u8]) -> Result {
    while stream.read_exact(bytes).is_ok() {
        stream.write_all(&[1]).map_err(peers::failed("TCP"))?;
    }
    Ok(())
}

fn print(what: &impl Serialize) {
    println!("{}", serde_json::to_string(what).expect("figures are JSON"));
}

/// The two processes, as their parent has them. They end when this is dropped.
pub(crate) struct OnDemand {
    first: ChildGuard,
    second: ChildGuard,
    errands: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Places {
    /// Starts both in the containers of the pair of this number, or where there are given
    /// addresses.
    pub(crate) fn on_demand(&self, link: Link, work: &Work, number: usize) -> Result<OnDemand> {
        let second = self.start(link, work, Side::Second, number)?;
        self.start(link, work, Side::First, number).map(|first| OnDemand::of(first, second))
    }

    /// Starts both with the addresses of the first two containers, the second in the container
    /// `at`.
    pub(crate) fn on_demand_at(&self, work: &Work, at: usize) -> Result<OnDemand> {
        let second = self.start_at(Link::Plain, work, Side::Second, [1, 0], at)?;
        self.start(Link::Plain, work, Side::First, 0).map(|first| OnDemand::of(first, second))
    }
}

impl OnDemand {
    fn of(mut first: ChildGuard, second: ChildGuard) -> Self {
        let (errands, lines) = (first.child_mut().stdin.take(), lines(&mut first));
        Self { first, second, errands, lines }
    }

    /// Waits until the first message has arrived. Error: it does not within this time, or a
    /// process has ended.
    pub(crate) fn ready(&mut self, within: Duration) -> Result<Ready> {
        match self.line(within)? {
            Some(ready) => Ok(ready),
            None => Err(Failure::Failed(format!("not ready: {}", last_words(&mut self.first)))),
        }
    }

    /// Asks for messages.
    pub(crate) fn ask(&mut self, errand: Errand) {
        let line = serde_json::to_string(&errand).expect("an errand is JSON");
        // The answer of a process that has ended is missing.
        let _ = self.errands.as_mut().map(|pipe| writeln!(pipe, "{line}"));
    }

    /// The result of the last errand. `None` if there is none within this time. Error: the process
    /// has ended.
    pub(crate) fn sent(&mut self, within: Duration) -> Result<Option<Sent>> {
        self.line(within)
    }

    /// Kills the second process (SIGKILL).
    pub(crate) fn kill_second(&mut self) {
        self.second.kill();
    }

    fn line<T: DeserializeOwned>(&mut self, within: Duration) -> Result<Option<T>> {
        match self.lines.recv_timeout(within) {
            Ok(line) => {
                let parsed = serde_json::from_str(&line);
                let why = |_| Failure::Failed(format!("a worker printed no figures: {line:?}"));
                parsed.map(Some).map_err(why)
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Failure::Failed(last_words(&mut self.first)))
            }
        }
    }
}

impl Ready {
    /// Error: a device uses another backend than the work asks for.
    pub(crate) fn check(&self, work: &Work) -> Result {
        let Work::OnDemand { traffic: Traffic::Verbs(Device::Software { backend, .. }), .. } = work
        else {
            return Ok(());
        };
        match self.devices.iter().find(|device| device.backend != *backend) {
            Some(Opened { backend: has, .. }) => {
                let why = format!("the device fell back from {backend} to {has}");
                Err(Failure::Failed(why))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errand_ends_by_messages_by_time_and_by_an_error() {
        let errand = |messages, millis| Errand { messages, millis };
        let sent = errand(3, 60_000).carry_out(&mut || Ok(()));
        assert_eq!((sent.messages, &sent.error), (3, &None));
        assert!(sent.at > 0 && sent.longest_ms < 60_000.0);
        let mut slow = || {
            std::thread::sleep(Duration::from_millis(3));
            Ok(())
        };
        let sent = errand(u64::MAX, 10).carry_out(&mut slow);
        assert!((1..=4).contains(&sent.messages) && sent.longest_ms >= 3.0, "{sent:?}");
        let mut left = 2;
        let sent = errand(9, 60_000).carry_out(&mut || {
            left -= 1;
            if left < 0 { Err("it is gone".to_owned()) } else { Ok(()) }
        });
        assert_eq!((sent.messages, sent.error.as_deref()), (2, Some("it is gone")));
    }

    #[test]
    fn a_device_that_fell_back_is_found() {
        let device = |backend: &str| Device::Software {
            backend: backend.to_owned(),
            small_buffers: false,
            handed: false,
            contained: false,
        };
        let work = |device| Work::OnDemand { traffic: Traffic::Verbs(device), mtu: 4096, size: 64 };
        let opened = |backend: &str| Opened { backend: backend.to_owned(), ms: 1.0 };
        let ready = |second| Ready { devices: vec![opened("packet"), opened(second)], at: 1 };
        assert_eq!(ready("packet").check(&work(device("packet"))), Ok(()));
        let error = ready("udp").check(&work(device("packet"))).unwrap_err().to_string();
        assert!(error.contains("fell back from packet to udp"), "{error}");
        let tcp = Work::OnDemand { traffic: Traffic::Tcp, mtu: 4096, size: 64 };
        assert_eq!(Ready { devices: Vec::new(), at: 1 }.check(&tcp), Ok(()));
    }
}
