//! `rocinante-bench` on the kernel's device: the rows of Soft-RoCE have bandwidth and latency.

use std::net::IpAddr;
use std::time::Duration;

use serde::Deserialize;

use crate::guest::Guest;
use crate::matrix::Step;

/// How long it may take: some seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(240);

/// The fields that a row must have, with any values.
#[derive(Debug, Deserialize)]
struct Row {
    measure: String,
    netdev: String,
    size: usize,
    value: f64,
    samples: usize,
}

/// Runs both processes on `device`, which has `address`.
pub(super) fn run(guest: &Guest, device: &str, address: IpAddr) -> Step {
    let command = format!(
        "exec /host/rocinante-bench-under-interop --local {address} --remote {address} --devices {device},{device} --netdev hw \
         --only write_bw,write_lat --mtu 1024 --runs 1 --seconds 0.05 --json"
    );
    let outcome = guest.run(&command, LIMIT).map_err(|error| error.to_string())?;
    let said = || format!("it ended with {}: {}{}", outcome.code, outcome.stdout, outcome.stderr);
    if outcome.code != 0 {
        return Err(said());
    }
    let rows = outcome.stdout.lines().map(serde_json::from_str::<Row>);
    let rows =
        rows.collect::<Result<Vec<_>, _>>().map_err(|error| format!("{error}: {}", said()))?;
    for wanted in [("write_bw", 1 << 20), ("write_lat", 64)] {
        let is_wanted = |row: &&Row| (row.measure.as_str(), row.size) == wanted;
        match rows.iter().filter(is_wanted).collect::<Vec<_>>()[..] {
            [Row { netdev, value, samples: 1, .. }] if netdev == "rxe" && *value > 0.0 => {}
            _ => {
                return Err(format!(
                    "there is no row of rxe with a value for {wanted:?}: {}",
                    said()
                ));
            }
        }
    }
    Ok(())
}
