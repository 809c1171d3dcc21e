//! Programs that start at once, and connections.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_cli::measure::Spread;
use rocinante_cli::output::{Failure, Result};
use rustix::net::{Shutdown, shutdown};

use super::super::plan::{Mode, PROGRAMS_MIN};
use super::{Figures, in_words, milliseconds, named};
use crate::cm;
use crate::workers::{Link, PlaceArgs, Places, Ready, Work, now};

/// The longest time until all have moved a message, and that for each of them.
const ALL: Duration = Duration::from_secs(20);
const EACH: Duration = Duration::from_millis(500);
/// Connections that are held at once.
const HELD: u32 = 1000;
/// TCP port of connections that are made and ended.
const PORT: u16 = 18_519;

/// How programs start.
pub(super) struct How<'a> {
    pub(super) args: &'a PlaceArgs,
    pub(super) mode: &'a Mode,
    pub(super) work: &'a Work,
    /// How long connections are made and ended.
    pub(super) seconds: f64,
}

/// The figures of this many programs, in pairs.
pub(super) fn measure(places: &Places, how: &How<'_>, programs: u64) -> Result<Figures> {
    places.lab()?;
    let began = now();
    let start = |pair| places.on_demand(Link::Plain, how.work, pair);
    let running = (0..programs as usize / 2).map(start).collect::<Result<Vec<_>>>()?;
    let deadline = Instant::now() + ALL + EACH * programs as u32;
    let (mut ready, mut why) = (Vec::new(), None);
    for mut pair in running {
        match pair.ready(deadline.saturating_duration_since(Instant::now())) {
            // They run until all have started.
            Ok(line) => ready.push((line, pair)),
            Err(failure) => why = why.or(Some(failure)),
        }
    }
    let lines: Vec<&Ready> = ready.iter().map(|(line, _)| line).collect();
    let Some(mut figures) = figures(&lines, began, programs) else {
        return Err(why.unwrap_or_else(|| Failure::Failed("no program was started".into())));
    };
    drop(ready);
    if programs == PROGRAMS_MIN {
        if !how.mode.is_handed() {
            figures.insert("container_ms".into(), milliseconds(container(how)?));
        }
        figures.extend(connections(places, how)?);
    }
    Ok(figures)
}

/// The figures of the pairs that have moved a message. `None` if there are none.
fn figures(ready: &[&Ready], began: u64, programs: u64) -> Option<Figures> {
    let after = |ready: &&Ready| milliseconds(Duration::from_nanos(ready.at.saturating_sub(began)));
    let times: Vec<f64> = ready.iter().map(after).collect();
    let times = Spread::of(times)?;
    let mut figures = named([
        ("first_byte_median_ms", times.median),
        ("first_byte_last_ms", times.max),
        ("lost", programs as f64 - 2.0 * ready.len() as f64),
    ]);
    let devices = || ready.iter().flat_map(|ready| &ready.devices);
    if let Some(opening) = Spread::of(devices().map(|device| device.ms).collect()) {
        figures
            .extend(named([("attach_median_ms", opening.median), ("attach_last_ms", opening.max)]));
    }
    let mut got = BTreeMap::new();
    for device in devices() {
        *got.entry(format!("got_{}", device.backend)).or_insert(0.0) += 1.0;
    }
    figures.extend(got);
    Some(figures)
}

/// From making a host and two containers until their programs have moved a message.
fn container(how: &How<'_>) -> Result<Duration> {
    let began = Instant::now();
    let places = Places::of(how.args, Link::Bridge, 2)?;
    let mut pair = places.on_demand(Link::Plain, how.work, 0)?;
    pair.ready(ALL)?.check(how.work)?;
    Ok(began.elapsed())
}

/// Connections that are made and ended, and those that are held.
fn connections(places: &Places, how: &How<'_>) -> Result<Figures> {
    if how.mode.is_tcp() {
        return Ok(named([("connections_per_s", streams(places, how.seconds)?)]));
    }
    let Some(backend) = how.mode.backend().filter(|_| how.mode.is_plain_verbs()) else {
        return Ok(Figures::new());
    };
    let backend: Backend = backend.parse().map_err(Failure::Failed)?;
    let report = cm::of_backend(backend, how.seconds, HELD)?;
    Ok(named([
        ("connections_per_s", report.connections_per_s),
        ("connect_p50_us", report.connect_us_p50),
        ("held_1000_ms", report.held_after_s * 1e3),
    ]))
}

/// Streams between the first two containers that are made and ended in a second, one at a time.
fn streams(places: &Places, seconds: f64) -> Result<f64> {
    let [client, server] = [0, 1].map(|index| places.container(Link::Plain, index));
    let (client, server) = (client?, server?);
    let at = (server.ipv4(), PORT);
    let listener = server.run(|| TcpListener::bind(at)).map_err(in_words)?.map_err(in_words)?;
    thread::scope(|scope| {
        // The server ends each at once, so that the client's port is free again.
        scope.spawn(|| while listener.accept().is_ok() {});
        let connected = client.run(|| {
            let (began, mut count) = (Instant::now(), 0_u64);
            while began.elapsed().as_secs_f64() < seconds {
                TcpStream::connect(at)?.read_exact(&mut [0]).or_else(ended)?;
                count += 1;
            }
            Ok::<f64, io::Error>(count as f64 / began.elapsed().as_secs_f64())
        });
        // The thread that accepts ends.
        shutdown(&listener, Shutdown::Both).map_err(in_words)?;
        connected.map_err(in_words)?.map_err(in_words)
    })
}

/// The end of a stream is no error.
fn ended(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::UnexpectedEof { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::Opened;

    #[test]
    fn each_program_got_a_backend_or_is_lost() {
        let opened = |backend: &str, ms| Opened { backend: backend.to_owned(), ms };
        let ready = |at: u64, devices: [(&str, f64); 2]| Ready {
            devices: devices.map(|(backend, ms)| opened(backend, ms)).to_vec(),
            at: at * 1_000_000,
        };
        let all = [
            ready(30, [("packet", 2.0), ("packet", 4.0)]),
            ready(50, [("packet", 6.0), ("udp", 9.0)]),
        ];
        let all: Vec<&Ready> = all.iter().collect();
        let figures = figures(&all, 10_000_000, 6).unwrap();
        assert_eq!((figures["got_packet"], figures["got_udp"], figures["lost"]), (3.0, 1.0, 2.0));
        assert_eq!((figures["first_byte_median_ms"], figures["first_byte_last_ms"]), (30.0, 40.0));
        assert_eq!((figures["attach_median_ms"], figures["attach_last_ms"]), (5.0, 9.0));
        assert_eq!(super::figures(&[], 0, 6), None);
    }
}
