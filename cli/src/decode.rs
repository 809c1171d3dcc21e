//! `rocinante decode`: prints every RoCEv2 packet of a capture file, and checks its ICRC.
//!
//! Packet analysers show RoCEv2 but do not check the ICRC. So a sender with wrong ICRCs looks
//! perfect in them, while its peer drops everything.

pub mod check;
pub mod file;
pub mod frame;
pub mod line;
pub mod summary;

use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use check::Verdict;
use file::{Frame, ReadError};
use frame::Unsupported;
use line::Decoded;
use summary::Summary;

/// Print every RoCEv2 packet (UDP port 4791) of a capture file, and check its ICRC
///
/// One line per packet: number, seconds since the first frame, addresses, opcode, destination QP,
/// PSN, flags (SE solicited, M MigReq, A AckReq, FECN, BECN), extension headers, payload length,
/// and whether the ICRC is right. Packets of a super-packet, as captured where segmentation is
/// offloaded, are numbered 7.1, 7.2 and so on.
///
/// Exit status: 0 if no ICRC is wrong, 1 if one is, 2 if the file cannot be read to its end.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A pcap or pcapng file (Ethernet, 802.1Q, Linux cooked, raw IP or BSD loopback), or - for
    /// standard input
    pub file: PathBuf,
    /// End standard output with the counts as one JSON object on one line; all else goes to
    /// standard error
    #[arg(long)]
    pub json: bool,
    /// Print only packets with a wrong ICRC, and the summary
    #[arg(short, long)]
    pub quiet: bool,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let summary = if args.json {
        report(args, io::stderr().lock())
    } else {
        report(args, io::stdout().lock())
    };
    if let Some(error) = &summary.error {
        eprintln!("rocinante decode: {error}");
    }
    if args.json {
        let json = serde_json::to_string(&summary).expect("counts are JSON");
        // The reader of our output may be gone; the exit status has the result, too.
        let _ = writeln!(io::stdout(), "{json}");
    }
    exit_code(&summary)
}

/// Prints everything except the JSON.
fn report(args: &Args, out: impl Write) -> Summary {
    let mut out = BufWriter::with_capacity(1 << 16, out);
    let (mut summary, end) = decode(args, &mut out);
    summary.error = match end {
        // `rocinante decode FILE | head` is not an error.
        Err(ReadError::Sink(error)) if error.kind() == ErrorKind::BrokenPipe && !args.json => None,
        Err(error) => Some(format!("{} {error}", args.file.display())),
        Ok(()) => refusal(&summary),
    };
    let nothing_read = summary.error.is_some() && summary.packets == 0;
    let counts = if nothing_read { Ok(()) } else { writeln!(out, "{summary}") };
    let _ = counts.and_then(|()| out.flush());
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
        Summary { error: Some(_), .. } => ExitCode::from(2),
        Summary { icrc_bad: 1.., .. } => ExitCode::from(1),
        _ => ExitCode::SUCCESS,
    }
}

/// Prints the packets and counts them, up to the first error in the file.
fn decode(args: &Args, out: &mut impl Write) -> (Summary, Result<(), ReadError>) {
    let mut summary = Summary::default();
    let mut start_ns = None;
    let end = file::read(&args.file, |frame| {
        summary.packets += 1;
        let since_start_ns = frame.time_ns.map(|now| now - *start_ns.get_or_insert(now));
        let datagram = match frame::roce_datagram(frame.link, frame.data) {
            Ok(Some(datagram)) => datagram,
            Ok(None) => return Ok(()),
            Err(Unsupported(link)) => {
                *summary.unread.entry(link).or_default() += 1;
                return Ok(());
            }
        };
        let (src, dst) = datagram.addresses();
        for piece in check::pieces(&datagram) {
            let decoded = Decoded::new(piece);
            summary.count(decoded.opcode(), piece.verdict);
            if !args.quiet || matches!(piece.verdict, Verdict::Bad { .. }) {
                write_place(out, &frame, piece.index, since_start_ns)?;
                writeln!(out, "{src} → {dst} {decoded}")?;
            }
        }
        Ok(())
    });
    (summary, end)
}

/// Prints number and time.
fn write_place(
    out: &mut impl Write,
    frame: &Frame<'_>,
    index: Option<usize>,
    since_start_ns: Option<i128>,
) -> io::Result<()> {
    match index {
        Some(index) => write!(out, "{:>6}.{index:<2} ", frame.number)?,
        None => write!(out, "{:>6}    ", frame.number)?,
    }
    match since_start_ns {
        Some(ns) => {
            let sign = if ns < 0 { "-" } else { "" };
            let us = ns.unsigned_abs() / 1000;
            write!(out, "{sign}{}.{:06} ", us / 1_000_000, us % 1_000_000)
        }
        None => write!(out, "-.------ "),
    }
}
