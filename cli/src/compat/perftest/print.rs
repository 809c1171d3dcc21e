//! Results in the table format of perftest's programs, for scripts that read it.

use std::time::Duration;

use crate::perf::table::{Bandwidth, Latency};

use super::message::Report;
use super::plan::PerftestPlan;

/// The line between two parts.
pub const LINE: &str =
    "---------------------------------------------------------------------------------------";

/// The heads of the columns.
#[must_use]
pub fn header(plan: &PerftestPlan) -> String {
    if plan.test.is_bandwidth() {
        let unit = if plan.gbits { "Gb" } else { "MB" };
        return format!(
            " #bytes     #iterations    BW peak[{unit}/sec]    BW average[{unit}/sec]   MsgRate[Mpps]"
        );
    }
    if plan.iters() == 0 {
        return " #bytes        #iterations       t_avg[usec]    tps average".to_owned();
    }
    " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] "
        .to_owned()
}

/// Units of 2²⁰ bytes in 10⁹ bits.
const MB_PER_GB: f64 = 1e9 / 8.0 / (1 << 20) as f64;

/// Converts 10⁹ bits per second to the printed unit: that, or 2²⁰ bytes per second.
fn units(plan: &PerftestPlan, gbps: f64) -> f64 {
    if plan.gbits { gbps } else { gbps * MB_PER_GB }
}

/// The report of a peer in this side's unit. A report does not name its unit, but has the size and
/// the rate of the messages, from which the bandwidth follows.
#[must_use]
pub fn in_own_unit(plan: &PerftestPlan, report: Report) -> Report {
    let gbps = report.rate * 1e6 * report.size as f64 * 8.0 / 1e9;
    let is_about = |unit: f64| (0.5..2.0).contains(&(report.average / unit));
    let factor = if plan.gbits && is_about(gbps * MB_PER_GB) {
        1.0 / MB_PER_GB
    } else if !plan.gbits && is_about(gbps) {
        MB_PER_GB
    } else {
        1.0
    };
    Report { peak: report.peak * factor, average: report.average * factor, ..report }
}

/// The report of a bandwidth for the peer. Its `iters` count the messages of all queue pairs, as
/// those programs do.
#[must_use]
pub fn report(plan: &PerftestPlan, row: &Bandwidth) -> Report {
    let all = plan.iters().saturating_mul(plan.qps.into());
    let whole = all > 0 && row.lost.unwrap_or(0) == 0;
    let iters = if whole { all } else { row.messages };
    let peak = if plan.peak { units(plan, row.gbps_peak) } else { 0.0 };
    let average = units(plan, row.gbps);
    Report { size: row.bytes as u64, iters, peak, average, rate: row.mpps }
}

/// The row of a bandwidth.
#[must_use]
pub fn bandwidth(plan: &PerftestPlan, report: &Report) -> String {
    let Report { size, iters, peak, average, rate } = report;
    if plan.gbits && *average < 0.1 {
        return format!(
            " {size:<7}    {iters}           {peak:<7.6}            {average:<7.6}            {rate:<7.6}"
        );
    }
    format!(
        " {size:<7}    {iters:<10}       {peak:<7.2}            {average:<7.2}\t\t   {rate:<7.6}"
    )
}

/// The row of a latency.
#[must_use]
pub fn latency(plan: &PerftestPlan, row: &Latency, elapsed: Duration) -> String {
    let size = row.bytes;
    if plan.iters() == 0 {
        let rate = row.messages as f64 / elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
        let (iters, average) = (row.messages, row.us_avg);
        return format!(" {size:<7}       {iters}            {average:<7.2}        {rate:<7.2}");
    }
    let iters = plan.iters();
    format!(
        " {size:<7} {iters}          {:<7.2}        {:<7.2}      {:<7.2}  \t       {:<7.2}     \t{:<7.2}\t\t{:<7.2} \t\t{:<7.2}",
        row.us_min, row.us_max, row.us_p50, row.us_avg, row.us_stdev, row.us_p99, row.us_p99_9
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compat::perftest::tests::plan;

    #[test]
    fn rows_have_as_many_columns_as_heads() {
        let columns = |text: &str| text.split_whitespace().count();
        let report =
            Report { size: 65_536, iters: 5000, peak: 1200.5, average: 1100.25, rate: 0.0176 };
        for line in ["write-bw", "write-bw --report_gbits"] {
            let plan = plan(line).unwrap();
            // "BW peak" and "BW average" are two words each.
            assert_eq!(columns(&bandwidth(&plan, &report)), columns(&header(&plan)) - 2);
        }
        let mb = bandwidth(&plan("write-bw").unwrap(), &report);
        let fields: Vec<&str> = mb.split_whitespace().collect();
        assert_eq!(fields, ["65536", "5000", "1200.50", "1100.25", "0.017600"]);
        let slow = Report { average: 0.012345, ..report };
        let gb = bandwidth(&plan("write-bw --report_gbits").unwrap(), &slow);
        assert!(gb.contains("0.012345"), "{gb}");
    }

    #[test]
    fn units_are_those_of_the_head() {
        let row = Bandwidth {
            bytes: 1,
            messages: 9,
            seconds: 1.0,
            gbps_peak: 16.0,
            gbps: 8.0,
            mpps: 1.0,
            lost: None,
        };
        let gb = report(&plan("write-bw -n 9 --report_gbits").unwrap(), &row);
        assert_eq!((gb.peak, gb.average, gb.iters), (16.0, 8.0, 9));
        let mb = report(&plan("write-bw -n 9 -q 3 -N").unwrap(), &row);
        assert_eq!(mb.iters, 27);
        assert!(mb.peak == 0.0 && (mb.average - 953.674_316).abs() < 1e-3, "{mb:?}");
        // Whichever unit the peer reports in, the figure is in the unit of the head.
        for (line, own) in [("write-bw -n 9 --report_gbits", gb), ("write-bw -n 9", mb)] {
            let plan = plan(line).unwrap();
            for theirs in [gb, mb] {
                let theirs = Report { size: 1000, rate: 1.0, ..theirs };
                let shown = in_own_unit(&plan, theirs);
                assert!((shown.average / own.average - 1.0).abs() < 1e-9, "{shown:?}");
            }
            let nothing = Report::default();
            assert_eq!(in_own_unit(&plan, nothing), nothing);
        }
        assert!(header(&plan("write-bw").unwrap()).contains("BW peak[MB/sec]"));
        assert!(header(&plan("send-lat").unwrap()).contains("t_typical[usec]"));
        assert!(header(&plan("send-lat -D 4").unwrap()).contains("tps average"));
    }
}
