//! Fixed work of the engine, for counting with `valgrind --tool=callgrind`.
//! `instructions NAME COUNT` performs an operation COUNT times, and `instructions` lists the
//! operations. `cargo xtask instructions` compares their cost with `benches/instructions.json`.

use std::process::ExitCode;

use rocinante_benches::engine::{Kind, Pace, Pair, Work};

/// The operations to count.
const OPERATIONS: [(&str, Work); 9] = [
    ("write-64", work(Kind::Write, 64, 128, Pace::Steady)),
    // Posted and acknowledged 32 at a time.
    ("write-64-burst", work(Kind::Write, 64, 32, Pace::Bursts)),
    // One at a time: the CPU cost of a round trip.
    ("write-64-alone", work(Kind::Write, 64, 1, Pace::Steady)),
    ("write-4096", work(Kind::Write, 4096, 32, Pace::Steady)),
    ("write-65536", work(Kind::Write, 65_536, 8, Pace::Steady)),
    ("send-64", work(Kind::Send, 64, 128, Pace::Steady)),
    ("read-64", work(Kind::Read, 64, 16, Pace::Steady)),
    ("fetch-add", work(Kind::FetchAdd, 8, 16, Pace::Steady)),
    ("datagram-64", work(Kind::Datagram, 64, 64, Pace::Steady)),
];

const fn work(kind: Kind, len: u32, depth: u64, pace: Pace) -> Work {
    Work { kind, len, depth, pace }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let wanted = match args[..] {
        [] => {
            OPERATIONS.iter().for_each(|(name, _)| println!("{name}"));
            return ExitCode::SUCCESS;
        }
        [wanted, count] => {
            OPERATIONS.iter().find(|(name, _)| *name == wanted).zip(count.parse().ok())
        }
        _ => None,
    };
    let Some(((_, work), count)) = wanted else {
        eprintln!("instructions [NAME COUNT]: without arguments it lists the names");
        return ExitCode::FAILURE;
    };
    Pair::new(work.kind).run(*work, count);
    ExitCode::SUCCESS
}
