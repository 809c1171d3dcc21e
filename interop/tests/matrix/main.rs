//! The matrix as named tests: `cargo test -p rocinante-interop --test matrix -- [--all] [FILTER]`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use rocinante_cli::lab::{Lab, LabConfig};
use rocinante_interop::guest::{Guest, GuestConfig, Image};
use rocinante_interop::matrix::{self, Bench, Cell};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = args.iter().filter(|a| !a.starts_with('-')).collect();
    let cells: Vec<Cell> = matrix::all()
        .into_iter()
        .filter(|cell| {
            let name = cell.name();
            filters.iter().all(|f| name.contains(f.as_str()))
        })
        .collect();
    let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() }).unwrap();
    let image = Image::prepare().unwrap();
    let programs = Path::new(env!("CARGO_BIN_EXE_rocinante-guest")).parent().unwrap();
    let guest = Guest::boot(&lab, &image, &GuestConfig::new(programs)).unwrap();
    let bench = Bench::new(lab, guest).unwrap();
    let mut failed = 0;
    for cell in &cells {
        let start = Instant::now();
        let result = bench.run(cell);
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(()) => println!("test {} ... ok ({seconds:.2} s)", cell.name()),
            Err(error) => {
                failed += 1;
                println!("test {} ... FAILED ({seconds:.2} s)\n    {error}", cell.name());
            }
        }
    }
    println!("{} cells, {failed} failed; {}", cells.len(), bench.guest.console());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
