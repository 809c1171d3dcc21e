//! Our side of the table: RDMA WRITEs through the verbs.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use rocinante::{Backend, Exchange, Mtu, OpenOptions, VerbsError};
use rocinante_cli::measure::{
    Bulk, BulkOp, Connected, End, MeasureError, Side, Until, bulk, serve, write_latency,
};
use serde_json::{Value, json};

use crate::figure::{Figure, Figures, Plan, REGION};

/// Depth of the send queue, and of the queue of completions.
const DEPTH: u32 = 1024;
const PATIENCE: Duration = Duration::from_secs(10);
const WARM_UP: Duration = Duration::from_millis(20);

/// A connected queue pair.
pub(super) struct Device(Connected);

impl Device {
    /// Opens the device of `address` and connects it to the one at the other end of `exchange`.
    ///
    /// # Errors
    /// What the backend lacks, or a peer that is silent.
    pub(super) fn connect(
        backend: Backend,
        address: Ipv4Addr,
        mtu: usize,
        exchange: &mut Exchange,
    ) -> Result<Self, VerbsError> {
        let ctx = OpenOptions::new().netdev(backend).open(IpAddr::V4(address))?;
        let mtu = u32::try_from(mtu).ok().and_then(Mtu::from_bytes);
        Ok(Self(Connected::new(ctx, mtu, DEPTH, REGION, exchange)?))
    }

    fn end(&self) -> End<'_> {
        self.0.end(PATIENCE)
    }

    /// Measures what `plan` says, together with [`answer`](Self::answer) at the other end.
    ///
    /// # Errors
    /// A failed request, or silence.
    pub(super) fn measure(
        &self,
        exchange: &mut Exchange,
        plan: &Plan,
    ) -> Result<Figures, MeasureError> {
        let mut figures = Figures::new();
        for &figure in &plan.figures {
            exchange.barrier("ready")?;
            let time = Duration::from_secs_f64(plan.seconds);
            let value = match figure {
                Figure::Latency => {
                    let times =
                        write_latency(&self.end(), exchange, Side::First, 64, Until::Time(time))?;
                    times.value_at_quantile(0.5) as f64 / 1e3
                }
                Figure::Rate => self.bulk(figure, time)?.mops(),
                Figure::Medium | Figure::Large => self.bulk(figure, time)?.gbps(),
            };
            figures.insert(figure, value);
            if figure != Figure::Latency {
                exchange.barrier("done")?;
            }
        }
        Ok(figures)
    }

    fn bulk(
        &self,
        figure: Figure,
        time: Duration,
    ) -> Result<rocinante_cli::measure::BulkResult, MeasureError> {
        let run = |time| {
            let (op, size, until) = (BulkOp::Write, figure.message(), Until::Time(time));
            let what = if figure == Figure::Rate {
                Bulk::small(op, size, until)
            } else {
                Bulk::large(op, size, (2 * REGION / size).min(64), until)
            };
            bulk(&[self.end()], &what, |_| ())
        };
        run(WARM_UP)?;
        run(time)
    }

    /// The other side of [`measure`](Self::measure).
    ///
    /// # Errors
    /// As [`measure`](Self::measure).
    pub(super) fn answer(&self, exchange: &mut Exchange, plan: &Plan) -> Result<(), MeasureError> {
        for &figure in &plan.figures {
            exchange.barrier("ready")?;
            if figure == Figure::Latency {
                write_latency(
                    &self.end(),
                    exchange,
                    Side::Second,
                    64,
                    Until::Time(Duration::ZERO),
                )?;
            } else {
                serve(self.0.ctx(), exchange, "done")?;
            }
        }
        Ok(())
    }

    /// Counters that explain a figure.
    #[must_use]
    pub(super) fn notes(&self) -> Value {
        let counters = self.0.ctx().counters();
        let transport: serde_json::Map<String, Value> = counters
            .transport
            .iter()
            .chain(counters.drops.iter())
            .filter(|(_, value)| *value != 0)
            .map(|(name, value)| (name.to_owned(), Value::from(value)))
            .collect();
        let port = counters.port;
        json!({
            "transport": transport,
            "tx_runs": port.tx_runs, "tx_datagrams": port.tx_datagrams, "tx_failed": port.tx_failed,
            "tx_blocked": port.tx_blocked, "tx_unresolved": port.tx_unresolved,
            "rx_runs": port.rx_runs, "rx_datagrams": port.rx_datagrams, "rx_queue_drops": port.rx_queue_drops,
        })
    }
}
