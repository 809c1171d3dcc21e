//! End to end: each backend beside its ceiling, between two namespaces.

mod machine;
mod ours;
mod report;
mod run;
mod table;
mod tcp;
mod worker;

use std::error::Error;

use clap::{Parser, ValueEnum};
use rocinante_cli::lab::{enter_user_namespace, exit_with_parent, kill_children_on_signal};

use crate::figure::Figure;
use worker::{Job, Subject};

/// Measures each backend beside a raw ceiling of the same backend, between two network namespaces.
///
/// A run measures everything once: one TCP stream, then for each backend and path MTU the ceiling (the same interface, super-packets,
/// ICRC and copies, but no protocol) and RDMA WRITEs, one right after the other, so that their ratio is that of one moment. Compare ratios; absolute
/// figures are the machine's mood.
#[derive(Debug, Parser)]
#[command(name = "e2e")]
pub struct Options {
    /// Which backends.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "all")]
    netdev: Vec<Netdev>,
    /// Path MTUs in bytes.
    #[arg(long, value_delimiter = ',', default_value = "4096,1024")]
    mtu: Vec<usize>,
    /// How often everything is measured: 5, or 3 with --quick.
    #[arg(long)]
    runs: Option<usize>,
    /// How long each figure is measured, in seconds: 0.4, or 0.15 with --quick.
    #[arg(long)]
    seconds: Option<f64>,
    /// Fewer runs, and shorter.
    #[arg(long)]
    quick: bool,
    /// One JSON object per line instead of the table: one for each run, backend and path MTU, and one for all.
    #[arg(long)]
    json: bool,
    /// Through a bridge in a third namespace, instead of over one veth.
    #[arg(long)]
    bridge: bool,
    /// Which figures.
    #[arg(long, value_enum, value_delimiter = ',')]
    figures: Vec<Figure>,
    /// What to measure; `port` is the backend's port without an engine.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "iperf3,tcp,ceiling,ours")]
    subjects: Vec<Subject>,
    /// Wait for one's turn among the other processes of the machine, instead of going first.
    #[arg(long)]
    patient: bool,
    /// The work of one process: started by the benchmark itself.
    #[arg(long, hide = true)]
    job: Option<String>,
}

/// A choice of backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Netdev {
    All,
    Udp,
    Packet,
    Afxdp,
}

impl Options {
    fn netdevs(&self) -> Vec<&'static str> {
        let wanted = |netdev| self.netdev.contains(&Netdev::All) || self.netdev.contains(&netdev);
        let all = [(Netdev::Udp, "udp"), (Netdev::Packet, "packet"), (Netdev::Afxdp, "afxdp")];
        all.into_iter().filter(|(netdev, _)| wanted(*netdev)).map(|(_, name)| name).collect()
    }

    fn runs(&self) -> usize {
        self.runs.unwrap_or(if self.quick { 3 } else { 5 }).max(1)
    }

    fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 0.15 } else { 0.4 })
    }

    fn figures(&self) -> Vec<Figure> {
        let wanted = |figure: &Figure| self.figures.is_empty() || self.figures.contains(figure);
        Figure::ALL.into_iter().filter(wanted).collect()
    }
}

/// The benchmark, or the part of it that this process is to do.
///
/// # Errors
/// No right to make namespaces, or a path MTU that does not exist. What could not be measured is in the report.
pub fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    if let Some(job) = &options.job {
        exit_with_parent();
        return serde_json::from_str::<Job>(job)?.run();
    }
    enter_user_namespace()?;
    kill_children_on_signal()?;
    if let Some(mtu) = options.mtu.iter().find(|mtu| ![256, 512, 1024, 2048, 4096].contains(*mtu)) {
        return Err(format!("no such path MTU: {mtu}: there are 256, 512, 1024, 2048, 4096").into());
    }
    let report = run::everything(&options)?;
    if options.json {
        report.print_json();
    } else {
        print!("{}", table::markdown(&report));
    }
    Ok(())
}
