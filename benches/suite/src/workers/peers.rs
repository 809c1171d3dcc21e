//! Other transports to compare with: TCP streams, UDP sockets, iperf3, sockperf.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rocinante::exchange::Exchange;
use rustix::net::sockopt::set_tcp_congestion;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cost;
use super::measure::{Figure, Measure, Step};
use super::ours::{WARM_UP, per_core};
use rocinante_cli::measure::{Side, histogram, record};
use rocinante_cli::output::{Failure, Result};

/// Bytes of the memory that a stream is sent from or received into.
const REGION: usize = 4 << 20;
/// Port of the stream, and of the datagrams.
pub(super) const PORT: u16 = 18_516;
/// Longest time without data.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause before a question, in which the other side falls asleep.
pub(super) const PAUSE: Duration = Duration::from_millis(2);
/// Seconds that iperf3 sends before it counts. It takes whole seconds only.
pub(crate) const IPERF3_WARM_UP: f64 = 1.0;
/// Seconds that sockperf takes beside those on its command line.
pub(crate) const SOCKPERF_WARM_UP: f64 = 1.0;
/// Round trips before the measured ones.
const FIRST: u32 = 50;
/// Ends a ping-pong.
const LAST: u8 = 255;
/// Calls after which one that would block looks at the time.
const CALLS: u32 = 64;

/// The congestion control of a TCP stream (`tcp(7)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Congestion {
    /// The default of most hosts.
    Cubic,
    Bbr,
}

impl Congestion {
    pub(crate) const ALL: [Self; 2] = [Self::Cubic, Self::Bbr];

    /// Its name in the kernel.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Cubic => "cubic",
            Self::Bbr => "bbr",
        }
    }

    /// Those that this kernel has.
    pub(crate) fn available() -> Vec<Self> {
        let path = "/proc/sys/net/ipv4/tcp_available_congestion_control";
        let known = std::fs::read_to_string(path).unwrap_or_default();
        let is_known = |one: &Self| known.split_whitespace().any(|name| name == one.name());
        Self::ALL.into_iter().filter(is_known).collect()
    }
}

/// How a TCP stream runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct TcpMode {
    pub(crate) cc: Congestion,
    /// Both ends spin, or else sleep in their calls.
    pub(crate) spin: bool,
}

pub(super) fn failed(what: &str) -> impl Fn(io::Error) -> Failure + '_ {
    move |error| Failure::Failed(format!("{what}: {error}"))
}

/// Connects the two sides by a stream that sends small messages at once.
pub(super) fn connect(
    side: Side,
    (local, remote): (IpAddr, IpAddr),
    exchange: &mut Exchange,
) -> Result<TcpStream> {
    let in_tcp = failed("TCP");
    let stream = match side {
        Side::First => {
            exchange.barrier("listening")?;
            TcpStream::connect((remote, PORT)).map_err(&in_tcp)?
        }
        Side::Second => {
            let listener = TcpListener::bind((local, PORT)).map_err(&in_tcp)?;
            exchange.barrier("listening")?;
            listener.accept().map_err(&in_tcp)?.0
        }
    };
    stream.set_nodelay(true).map_err(&in_tcp)?;
    Ok(stream)
}

/// A stream. Measures the goodput of writes of the step's size and its processor time, or half the
/// round trip of messages of that size.
pub(super) fn tcp(
    side: Side,
    ends: (IpAddr, IpAddr),
    exchange: &mut Exchange,
    mode: TcpMode,
    step: &Step,
) -> Result<Vec<Figure>> {
    let in_tcp = failed("TCP");
    let mut stream = connect(side, ends, exchange)?;
    set_tcp_congestion(&stream, mode.cc.name())
        .map_err(|error| Failure::Failed(format!("TCP with {}: {error}", mode.cc.name())))?;
    if mode.spin {
        stream.set_nonblocking(true).map_err(&in_tcp)?;
    } else {
        let each = Some(PATIENCE / CALLS);
        stream.set_read_timeout(each).map_err(&in_tcp)?;
        stream.set_write_timeout(each).map_err(&in_tcp)?;
    }
    let time = Duration::from_secs_f64(step.seconds);
    if step.measure == Measure::WriteLat {
        let times = ping_pong(side, step.size, time, None, |bytes, sends| {
            if sends { write_all(&mut stream, bytes) } else { read_all(&mut stream, bytes) }
        });
        let times = times.map_err(&in_tcp)?;
        return Ok(times.map_or_else(Vec::new, |times| tails(step, &times)));
    }
    let (begin, softirq) = (cost::own()?, cost::softirq()?);
    if side == Side::First {
        send(&mut stream, step.size, PATIENCE).map_err(&in_tcp)?;
        let line = exchange.hear()?;
        let theirs: Received = serde_json::from_str(&line)
            .map_err(|_| exchange.error(format_args!("it sent {line}")))?;
        let cpu = cost::own()? - begin + theirs.cpu + cost::softirq()? - softirq;
        return Ok(vec![
            step.figure(step.measure, theirs.gbps),
            step.figure(Measure::WriteBwPerCore, per_core(theirs.bytes, cpu)),
        ]);
    }
    let (gbps, bytes) = receive(&mut stream, time, PATIENCE).map_err(&in_tcp)?;
    drop(stream);
    let received = Received { gbps, bytes, cpu: cost::own()? - begin };
    exchange.say(&serde_json::to_string(&received).expect("figures are JSON"))?;
    Ok(Vec::new())
}

/// The report of a stream's receiver to its sender.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Received {
    gbps: f64,
    /// All bytes, and the processor time of this side in seconds, with the warm-up.
    bytes: u64,
    cpu: f64,
}

/// Sends until the receiver closes the stream.
fn send(stream: &mut TcpStream, size: usize, patience: Duration) -> io::Result<()> {
    let region = vec![0x5a; REGION.max(size)];
    let mut at = 0;
    loop {
        match spin(patience, || stream.write(&region[at..at + size])) {
            Ok(_) => at = (at + size) % (region.len() / size * size),
            Err(error) => {
                use ErrorKind::{BrokenPipe, ConnectionReset};
                let closed = matches!(error.kind(), BrokenPipe | ConnectionReset);
                return if closed { Ok(()) } else { Err(error) };
            }
        }
    }
}

/// Receives for a warm-up, and then counts for `time`. Returns 10⁹ bits per second, and the bytes
/// received from the start.
fn receive(stream: &mut TcpStream, time: Duration, patience: Duration) -> io::Result<(f64, u64)> {
    const CHUNK: usize = 256 << 10;
    let mut region = vec![0; REGION];
    let (mut at, mut bytes, mut before) = (0, 0_u64, 0);
    let (mut first, mut began) = (None, None);
    loop {
        match spin(patience, || stream.read(&mut region[at..at + CHUNK]))? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => bytes += read as u64,
        }
        at = (at + CHUNK) % REGION;
        let now = Instant::now();
        match began {
            None if now - *first.get_or_insert(now) >= WARM_UP => {
                (began, before) = (Some(now), bytes);
            }
            Some(began) if now - began >= time => {
                let counted = (bytes - before) as f64;
                return Ok((counted * 8.0 / (now - began).as_secs_f64() / 1e9, bytes));
            }
            _ => {}
        }
    }
}

pub(super) fn write_all(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = spin(PATIENCE, || stream.write(bytes))?;
        bytes = &bytes[written..];
    }
    Ok(())
}

pub(super) fn read_all(stream: &mut TcpStream, bytes: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        match spin(PATIENCE, || stream.read(&mut bytes[at..]))? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => at += read,
        }
    }
    Ok(())
}

/// Calls `call` until it would not block, or would not have waited in vain.
fn spin<T>(patience: Duration, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut since = None;
    loop {
        for _ in 0..CALLS {
            match call() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                other => return other,
            }
        }
        if since.get_or_insert_with(Instant::now).elapsed() > patience {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}

/// Sends messages to and fro until the time is over, with the pause `apart` before each if there is
/// one. Returns the halves of the round trips, at the first side. `transfer` sends the bytes if its
/// second argument is `true`, and else receives the same number.
pub(super) fn ping_pong(
    side: Side,
    size: usize,
    time: Duration,
    apart: Option<Duration>,
    mut transfer: impl FnMut(&mut [u8], bool) -> io::Result<()>,
) -> io::Result<Option<Histogram<u64>>> {
    let mut histogram = histogram();
    let mut bytes = vec![0; size.max(1)];
    let begin = Instant::now();
    let mut before = begin;
    for number in 0_u32.. {
        let last = number > FIRST && before - begin >= time;
        if side == Side::First {
            bytes[0] = if last { LAST } else { 0 };
            if let Some(apart) = apart {
                pause(apart);
                before = Instant::now();
            }
            transfer(&mut bytes, true)?;
            transfer(&mut bytes, false)?;
            let after = Instant::now();
            if number >= FIRST {
                record(&mut histogram, (after - before) / 2);
            }
            before = after;
        } else {
            transfer(&mut bytes, false)?;
            transfer(&mut bytes, true)?;
        }
        if bytes[0] == LAST {
            break;
        }
    }
    Ok((side == Side::First).then_some(histogram))
}

/// A quantile of a histogram of nanoseconds, in microseconds.
pub(super) fn quantile_us(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    histogram.value_at_quantile(quantile) as f64 / 1e3
}

/// The median of a step's times, and if they are of `write_lat` their 99th and 99.9th percentile.
pub(super) fn tails(step: &Step, times: &Histogram<u64>) -> Vec<Figure> {
    let quantile = |measure| match measure {
        Measure::WriteLatP99 => 0.99,
        Measure::WriteLatP999 => 0.999,
        _ => 0.5,
    };
    let figure = |measure| step.figure(measure, quantile_us(times, quantile(measure)));
    step.figures().map(figure).collect()
}

/// UDP sockets: [`Measure::SendLatBlocking`] with both sides sleeping, or [`Measure::WakeUp`].
pub(super) fn udp(
    side: Side,
    (local, remote): (IpAddr, IpAddr),
    exchange: &mut Exchange,
    step: &Step,
) -> Result<Option<Figure>> {
    let in_udp = failed("UDP");
    let socket = UdpSocket::bind((local, PORT)).map_err(&in_udp)?;
    socket.connect((remote, PORT)).map_err(&in_udp)?;
    // A veth loses no datagram, except when the receiver has no socket.
    socket.set_read_timeout(Some(PATIENCE)).map_err(&in_udp)?;
    exchange.barrier("bound")?;
    let time = Duration::from_secs_f64(step.seconds);
    let value = if step.measure == Measure::WakeUp {
        let mut round_trip = |sleeps: bool| -> Result<Option<f64>> {
            exchange.barrier("question")?;
            socket.set_nonblocking(side == Side::First || !sleeps).map_err(&in_udp)?;
            let apart = Some(PAUSE).filter(|_| side == Side::First);
            let half = ping_pong(side, step.size, time / 2, apart, |bytes, sends| {
                datagram(&socket, bytes, sends)
            });
            Ok(half.map_err(&in_udp)?.map(|half| 2.0 * quantile_us(&half, 0.5)))
        };
        let (spins, sleeps) = (round_trip(false)?, round_trip(true)?);
        spins.zip(sleeps).and_then(|(spins, sleeps)| wake_up(spins, sleeps))
    } else {
        let half =
            ping_pong(side, step.size, time, None, |bytes, sends| datagram(&socket, bytes, sends));
        half.map_err(&in_udp)?.map(|half| quantile_us(&half, 0.5))
    };
    Ok(value.map(|value| step.figure(step.measure, value)))
}

/// The extra time of a round trip if the answering process sleeps. `None` if the time is shorter,
/// as on a busy machine, or on a virtual one with a busy host. There, other processes often had the
/// core of the spinning process when the question came, while a process that has slept is scheduled
/// at once. The difference is then a time slice of those others, and no wake-up.
fn wake_up(spins_us: f64, sleeps_us: f64) -> Option<f64> {
    Some(sleeps_us - spins_us).filter(|longer| *longer > 0.0)
}

fn datagram(socket: &UdpSocket, bytes: &mut [u8], sends: bool) -> io::Result<()> {
    spin(PATIENCE, || if sends { socket.send(bytes) } else { socket.recv(bytes) }).map(drop)
}

/// Spins, because a core that rests would be slow afterwards.
pub(super) fn pause(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// The figures of one stream in iperf3's report: its goodput, and the processor time of both ends
/// per 10⁹ bytes.
pub(super) fn iperf3_figures(report: &str, step: &Step) -> Result<Vec<Figure>> {
    let what = |why: &dyn std::fmt::Display| Failure::Failed(format!("iperf3: {why}: {report}"));
    let json: Value = serde_json::from_str(report).map_err(|error| what(&error))?;
    let end = &json["end"];
    let received = &end["sum_received"];
    let number = |value: &Value| value.as_f64();
    let figures = || {
        let (bytes, seconds) = (number(&received["bytes"])?, number(&received["seconds"])?);
        let cpu = &end["cpu_utilization_percent"];
        let busy = (number(&cpu["host_total"])? + number(&cpu["remote_total"])?) / 100.0 * seconds;
        let gbps = number(&received["bits_per_second"])? / 1e9;
        Some(vec![
            step.figure(Measure::WriteBw, gbps),
            step.figure(Measure::CpuPerGb, busy / (bytes / 1e9)),
        ])
    };
    figures().ok_or_else(|| what(&"no figures"))
}

/// The figures of a ping-pong in sockperf's report, which are halves of round trips.
pub(super) fn sockperf_figures(report: &str, step: &Step) -> Result<Vec<Figure>> {
    let percentile = |of: &str| {
        let (_, rest) = report.split_once(&format!("percentile {of} ="))?;
        rest.split_whitespace().next()?.parse::<f64>().ok()
    };
    let figure = |measure| {
        let value = percentile(match measure {
            Measure::WriteLatP99 => "99.000",
            Measure::WriteLatP999 => "99.900",
            _ => "50.000",
        })?;
        Some(step.figure(measure, value))
    };
    let figures: Option<Vec<Figure>> = step.figures().map(figure).collect();
    figures.ok_or_else(|| Failure::Failed(format!("sockperf: no figures: {}", report.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stream() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let receiver = listener.accept().unwrap().0;
        for stream in [&sender, &receiver] {
            stream.set_nonblocking(true).unwrap();
        }
        (sender, receiver)
    }

    #[test]
    fn a_stream_warms_up_and_is_then_counted_until_the_receiver_has_enough() {
        let (mut sender, mut receiver) = stream();
        let time = Duration::from_millis(30);
        std::thread::scope(|scope| {
            let sends = scope.spawn(move || send(&mut sender, 65_536, PATIENCE));
            let start = Instant::now();
            let (gbps, bytes) = receive(&mut receiver, time, PATIENCE).unwrap();
            assert!(gbps > 0.0 && bytes as f64 * 8.0 / 1e9 > gbps * time.as_secs_f64());
            assert!(start.elapsed() >= WARM_UP + time);
            drop(receiver);
            sends.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_stream_may_last_longer_than_it_may_be_silent() {
        let patience = Duration::from_secs(2);
        let (mut sender, mut receiver) = stream();
        std::thread::scope(|scope| {
            let sends = scope.spawn(move || send(&mut sender, 65_536, PATIENCE));
            receive(&mut receiver, patience.mul_f64(1.05), patience).unwrap();
            drop(receiver);
            sends.join().unwrap().unwrap();
        });
        // Neither side waits for ever.
        let patience = Duration::from_millis(50);
        let (mut silent, mut receiver) = stream();
        let kind = receive(&mut receiver, patience, patience).unwrap_err().kind();
        assert_eq!(kind, ErrorKind::TimedOut);
        let kind = send(&mut silent, 65_536, patience).unwrap_err().kind();
        assert_eq!(kind, ErrorKind::TimedOut);
        drop(silent);
        while receiver.read(&mut [0; 65_536]).is_ok_and(|read| read > 0) {}
        let kind = receive(&mut receiver, patience, patience).unwrap_err().kind();
        assert_eq!(kind, ErrorKind::UnexpectedEof);
    }

    #[test]
    fn without_a_core_of_its_own_no_wake_up_is_measured() {
        assert_eq!(wake_up(30.0, 80.0), Some(50.0));
        assert_eq!(wake_up(5000.0, 80.0), None);
    }

    #[test]
    fn what_iperf3_reports_is_read() {
        let report = json!({"end": {
            "sum_received": {"bytes": 2e9, "seconds": 1.0, "bits_per_second": 16e9},
            "cpu_utilization_percent": {"host_total": 90.0, "remote_total": 70.0},
        }});
        let step = Step { measure: Measure::WriteBw, size: 131_072, seconds: 1.0 };
        let figures = iperf3_figures(&report.to_string(), &step).unwrap();
        let values: Vec<_> = figures.iter().map(|figure| (figure.measure, figure.value)).collect();
        assert_eq!(values, [(Measure::WriteBw, 16.0), (Measure::CpuPerGb, 0.8)]);
        let refused = iperf3_figures(r#"{"error": "Connection refused"}"#, &step).unwrap_err();
        assert!(refused.to_string().contains("Connection refused"), "{refused}");
    }

    #[test]
    fn what_sockperf_reports_is_read() {
        let report = "\
sockperf: \u{1b}[2;35mSummary: Latency is 5.123 usec\u{1b}[0m
sockperf: Total 9 observations; each percentile contains 0.09 observations
sockperf: ---> <MAX> observation =   90.108
sockperf: ---> percentile 99.990 =   90.100
sockperf: ---> percentile 99.900 =   21.500
sockperf: ---> percentile 99.000 =    9.250
sockperf: ---> percentile 50.000 =    4.750
";
        let step = Step { measure: Measure::WriteLat, size: 64, seconds: 1.0 };
        let figures = sockperf_figures(report, &step).unwrap();
        let values: Vec<_> = figures.iter().map(|figure| (figure.measure, figure.value)).collect();
        let expected = [
            (Measure::WriteLat, 4.75),
            (Measure::WriteLatP99, 9.25),
            (Measure::WriteLatP999, 21.5),
        ];
        assert_eq!(values, expected);
        let step = Step { measure: Measure::SendLatBlocking, ..step };
        assert_eq!(sockperf_figures(report, &step).unwrap().len(), 1);
        let refused = sockperf_figures("sockperf: ERROR: refused", &step).unwrap_err();
        assert!(refused.to_string().contains("refused"), "{refused}");
    }
}
