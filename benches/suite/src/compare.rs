//! `rocinante-bench compare`: the same measurements on several providers, one right after the
//! other, and their ratios.
//!
//! A provider is a backend of the software device, or a device of the hardware (or Soft-RoCE),
//! where there is one. Each measurement has two processes of its own, bound to two cores. All
//! providers take turns within a run, and the runs follow each other. So a machine that changes its
//! speed changes it for all of them.

mod figure;
mod table;

use std::process::ExitCode;

use rocinante::verbs::Mtu;

use self::figure::{FigureKey, figures, plan};
use self::table::Comparison;
use crate::workers::{Figure, Link, PlaceArgs, Places, Provider, Work};
use rocinante_cli::output::{Failure, Output, Result};
use rocinante_cli::session::mtu;

/// Measure several providers side by side: latency, message rate, bandwidth, processor time
///
/// Without addresses it joins two network namespaces by a veth and compares the backends of the
/// software device there. With --local and --remote it works between two addresses of this
/// namespace that reach each other over a wire. With --devices, it measures the RDMA devices of
/// these two addresses, and the software device between two namespaces as without addresses:
/// Soft-RoCE holds UDP/4791 of all addresses of its namespace.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Providers; the others are compared with the first: hw, udp, packet, afxdp [default: all that
    /// are available]
    #[arg(long, value_delimiter = ',')]
    providers: Vec<Provider>,
    #[command(flatten)]
    place: PlaceArgs,
    /// How often everything is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// How long each figure is measured, in seconds
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// Path MTUs in bytes
    #[arg(long, value_delimiter = ',', default_value = "1024,4096", value_parser = mtu)]
    mtu: Vec<Mtu>,
    /// Only figures with this in their names
    #[arg(long)]
    only: Option<String>,
    /// Print one JSON object on the last line of standard output, and everything else to standard
    /// error
    #[arg(long)]
    json: bool,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let output = Output { json: args.json };
    let result = compare(args, output);
    if let Ok(comparison) = &result {
        output.line(comparison);
    }
    output.end("rocinante-bench compare", &result)
}

fn compare(args: &Args, output: Output) -> Result<Comparison> {
    if args.seconds.is_nan() || !(0.01..=60.0).contains(&args.seconds) {
        return Err(Failure::Usage("--seconds must be from 0.01 to 60".into()));
    }
    let providers = Provider::wanted(&args.providers, &args.place)?;
    let places = Places::new(&args.place)?;
    let mut comparison = Comparison::new(providers.clone());
    for run in 1..=args.runs {
        for &mtu in &args.mtu {
            for &provider in &providers {
                if comparison.is_skipped(provider) {
                    continue;
                }
                output.note(format_args!(
                    "run {run}: {} at path MTU {}",
                    provider.name(),
                    mtu.bytes()
                ));
                match measure(args, &places, provider, mtu) {
                    Ok(figures) => comparison.add(provider, figures),
                    // A provider that is not available is reported once. A failure in a later run
                    // is an error.
                    Err(Failure::Failed(why)) if run == 1 && args.providers.is_empty() => {
                        comparison.skip(provider, why);
                    }
                    Err(failure) => return Err(failure),
                }
            }
        }
    }
    comparison.check()?;
    Ok(comparison)
}

/// All figures of one provider at one path MTU, once.
fn measure(
    args: &Args,
    places: &Places,
    provider: Provider,
    mtu: Mtu,
) -> Result<Vec<(FigureKey, f64)>> {
    let mtu = mtu.bytes();
    let steps = plan(mtu, args.only.as_deref(), args.seconds);
    let keys: Vec<FigureKey> = steps.iter().flat_map(|step| figures(step, mtu)).collect();
    let device = provider.device(&args.place)?;
    let figures =
        places.figures(Link::Plain, &Work::Verbs { device, mtu, qps: 1, steps }).map_err(
            |failure| Failure::Failed(format!("{} at path MTU {mtu}: {failure}", provider.name())),
        )?;
    let keyed = figures
        .into_iter()
        .map(|Figure { measure, size, value }| (FigureKey { mtu, measure, size }, value));
    Ok(keyed.filter(|(key, _)| keys.contains(key)).collect())
}
