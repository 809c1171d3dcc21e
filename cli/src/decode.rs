//! `rocinante decode`: prints every RoCEv2 packet of a capture file, and checks its ICRC.
//!
//! Packet analysers show RoCEv2 but do not check the ICRC. So a sender with wrong ICRCs looks
//! perfect in them, while its peer drops everything.

pub mod check;
pub mod file;
pub mod flows;
pub mod frame;
pub mod line;
pub mod manage;
pub mod rewrite;
pub mod select;
pub mod summary;
mod tunnel;

use std::cell::RefCell;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;

use crate::ending;
use crate::output;
use file::{Frame, ReadError};
use flows::Flows;
use frame::Unsupported;
use line::{Decoded, Place};
use rewrite::Rewriter;
use select::Selection;
use summary::{Ended, Summary};

/// Print every RoCEv2 packet (UDP port 4791) of a capture file, and check its ICRC
///
/// One line per packet: number, seconds since the first frame, addresses, opcode, destination QP,
/// PSN, flags (SE solicited, A AckReq, FECN, BECN), extension headers, payload length, the message
/// of the connection manager, "again" for a packet that the capture has had before, and whether
/// the ICRC is right. Packets of a super-packet, as captured where segmentation is offloaded, are
/// numbered 7.1, 7.2 and so on.
///
/// A live capture is printed as it comes: `tcpdump -U -w - udp port 4791 | rocinante decode -`. A
/// WRITE of a few packets may be several WRITE_ONLY of one packet each: the sender splits it so
/// that all packets have one size.
///
/// Exit status: 0 if no ICRC is wrong, 1 if one is, 2 if the file cannot be read to its end.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A pcap or pcapng file (Ethernet, 802.1Q, Linux cooked, raw IP or BSD loopback), or - for
    /// standard input
    pub file: PathBuf,
    #[command(flatten)]
    selection: Selection,
    /// Print the traffic of each flow of the queue pair and the addresses: packets, bytes,
    /// retransmitted packets, ACKs, NAKs, RNR NAKs, and the time from a request to its response
    #[arg(long)]
    flows: bool,
    /// Write the packets to a pcapng file as a wire would carry them: those of a super-packet as
    /// frames of their own
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// End standard output with the counts as one JSON object on one line; all else goes to
    /// standard error
    #[arg(long)]
    json: bool,
    /// As --json, with one JSON object per packet before
    #[arg(long)]
    json_packets: bool,
    /// Print only packets with a wrong ICRC, and the summary
    #[arg(short, long)]
    pub quiet: bool,
}

const PROGRAM: &str = "rocinante decode";

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    // A signal ends the file, and the counts so far are printed.
    let _attentive = ending::attentive();
    let json = args.json || args.json_packets;
    let summary = if args.json && !args.json_packets {
        report(args, io::stderr().lock())
    } else {
        report(args, io::stdout().lock())
    };
    if let Some(error) = &summary.error {
        eprintln!("{PROGRAM}: {error}");
    }
    if json {
        // The reader of our output may be gone; the exit status has the result, too.
        let _ = writeln!(io::stdout(), "{}", output::object(PROGRAM, &summary));
    }
    exit_code(&summary)
}

/// Prints everything except the JSON of the summary: packets to `out`.
fn report(args: &Args, out: impl Write) -> Summary {
    let out = RefCell::new(BufWriter::with_capacity(1 << 16, out));
    let mut run = Run::new(args);
    let end = match &args.write {
        Some(path) => Rewriter::create(path, &args.file)
            .map_err(|error| ReadError::Copy(path.clone(), error))
            .and_then(|copy| run.decode(&out, Some(copy))),
        None => run.decode(&out, None),
    };
    let Run { mut summary, mut flows, .. } = run;
    flows.retain(|flow, src_qpn| args.selection.takes_flow(flow, src_qpn));
    let (mut out, json) = (out.into_inner(), args.json || args.json_packets);
    summary.error = match end {
        _ if ending::signal().is_some() => ending::signal().map(Ended::Signal),
        // `rocinante decode FILE | head` is not an error.
        Err(ReadError::Sink(error)) if error.kind() == ErrorKind::BrokenPipe && !json => None,
        Err(error @ ReadError::Copy(..)) => Some(Ended::File(error.to_string())),
        Err(error) => Some(Ended::File(format!("{} {error}", args.file.display()))),
        Ok(()) => refusal(&summary).map(Ended::File),
    };
    let nothing_read = matches!(summary.error, Some(Ended::File(_))) && summary.packets == 0;
    if args.flows {
        summary.flows = Some(flows.json());
        summary.untracked = Some(flows.untracked);
    }
    let table = if args.flows { flows.to_string() } else { String::new() };
    let _ = match nothing_read {
        true => Ok(()),
        false if args.json_packets => writeln!(io::stderr(), "{table}{summary}"),
        false => writeln!(out, "{table}{summary}"),
    };
    let _ = out.flush();
    summary
}

/// The reason why nothing was checked, if all frames have link types that cannot be read.
fn refusal(summary: &Summary) -> Option<String> {
    let unread = summary.unread.values().sum::<u64>();
    let (link, _) = summary.unread.first_key_value()?;
    (unread == summary.packets).then(|| Unsupported(*link).to_string())
}

fn exit_code(summary: &Summary) -> ExitCode {
    match summary {
        Summary { error: Some(Ended::Signal(signal)), .. } => {
            ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX))
        }
        Summary { error: Some(Ended::File(_)), .. } => ExitCode::from(2),
        Summary { icrc_bad: 1.., .. } => ExitCode::from(1),
        _ => ExitCode::SUCCESS,
    }
}

/// A capture that is being decoded.
struct Run<'a> {
    args: &'a Args,
    summary: Summary,
    flows: Flows,
    start_ns: Option<i128>,
}

impl<'a> Run<'a> {
    fn new(args: &'a Args) -> Self {
        let (summary, flows) = (Summary::default(), Flows::default());
        Self { args, summary, flows, start_ns: None }
    }

    /// Prints, counts and writes the packets, up to the first error in the file.
    fn decode(
        &mut self,
        out: &RefCell<impl Write>,
        copy: Option<Rewriter>,
    ) -> Result<(), ReadError> {
        // An answer tells which queue pair sends a flow: too late for the packets before it, unless
        // the file can be read twice.
        let twice = self.args.file.as_os_str() != "-" && self.args.file.is_file();
        if self.args.selection.qp.is_some() && twice {
            let mut first = Self::new(self.args);
            // The second reading meets the same error.
            let _ = file::read(&self.args.file, |frame| first.each(&frame, |_, _, _| Ok(())));
            self.flows = Flows::knowing(first.flows.senders());
        }
        let copy = RefCell::new(copy);
        let idle = || {
            let _ = out.borrow_mut().flush();
            let _ = copy.borrow_mut().as_mut().map_or(Ok(()), Rewriter::flush);
        };
        let args = self.args;
        file::read_live(&args.file, &idle, |frame| {
            self.each(&frame, |datagram, piece, (decoded, place)| {
                if let (Some(copy), Some(path)) = (copy.borrow_mut().as_mut(), &args.write) {
                    copy.write(&frame, datagram, piece)
                        .map_err(|error| ReadError::Copy(path.clone(), error))?;
                }
                if !args.quiet || decoded.is_bad() {
                    print(args, &mut *out.borrow_mut(), piece, decoded, place)
                        .map_err(ReadError::Sink)?;
                }
                Ok(())
            })
        })?;
        match (copy.borrow_mut().as_mut(), &args.write) {
            (Some(copy), Some(path)) => {
                copy.flush().map_err(|error| ReadError::Copy(path.clone(), error))
            }
            _ => Ok(()),
        }
    }

    /// Takes in a frame, and gives each of its packets that is wanted to `take`.
    fn each(
        &mut self,
        frame: &Frame<'_>,
        mut take: impl FnMut(
            &frame::Datagram<'_>,
            &check::Piece<'_>,
            (&Decoded<'_>, &Place),
        ) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        self.summary.packets += 1;
        let since_start_ns = frame.time_ns.map(|now| now - *self.start_ns.get_or_insert(now));
        let datagram = match frame::roce_datagram(frame.link, frame.data) {
            Ok(Some(datagram)) => datagram,
            Ok(None) => {
                if let Some(tunnel) = tunnel::around_roce(frame.link, frame.data) {
                    *self.summary.tunnelled.entry(tunnel).or_default() += 1;
                }
                return Ok(());
            }
            Err(Unsupported(link)) => {
                *self.summary.unread.entry(link).or_default() += 1;
                return Ok(());
            }
        };
        let ends = datagram.ip.addresses();
        for piece in check::pieces(&datagram) {
            let mut decoded = Decoded::new(piece);
            let known = self.flows.note(ends, frame.time_ns, &decoded);
            if !self.args.selection.takes(ends, &decoded, &known) {
                continue;
            }
            decoded.again = known.again;
            self.summary.count(decoded.opcode(), piece.verdict);
            let place = Place {
                frame: frame.number,
                time_ns: frame.time_ns,
                since_start_ns,
                ends,
                src_port: datagram.src_port,
                src_qpn: known.src_qpn,
            };
            take(&datagram, &piece, (&decoded, &place))?;
        }
        Ok(())
    }
}

/// Prints a packet.
fn print(
    args: &Args,
    out: &mut impl Write,
    piece: &check::Piece<'_>,
    decoded: &Decoded<'_>,
    place: &Place,
) -> io::Result<()> {
    if args.json_packets {
        let line = output::object(PROGRAM, json!({"packet": decoded.json(place)}));
        return writeln!(out, "{line}");
    }
    write_place(out, place, piece.index)?;
    let (src, dst) = place.ends;
    writeln!(out, "{src} → {dst} {decoded}")
}

/// Prints number and time.
fn write_place(out: &mut impl Write, place: &Place, index: Option<usize>) -> io::Result<()> {
    match index {
        Some(index) => write!(out, "{:>6}.{index:<2} ", place.frame)?,
        None => write!(out, "{:>6}    ", place.frame)?,
    }
    match place.since_start_ns {
        Some(ns) => {
            let sign = if ns < 0 { "-" } else { "" };
            let us = ns.unsigned_abs() / 1000;
            write!(out, "{sign}{}.{:06} ", us / 1_000_000, us % 1_000_000)
        }
        None => write!(out, "-.------ "),
    }
}
