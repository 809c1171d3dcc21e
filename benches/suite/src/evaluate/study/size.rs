//! Throughput and latency by the size of messages.

use std::collections::BTreeMap;

use rocinante_baselines::{Kind, Raw, Task};
use rocinante_cli::output::{Failure, Result};

use super::super::plan::{Carrier, Cell, Mode, seconds};
use super::{Figures, figure_name};
use crate::workers::{
    Carrier as Wire, Congestion, Device, Figure, Foreign, Measure, Places, Step, Suite, TcpMode,
    Traffic, Work, depth,
};

/// Bytes of the messages that a raw baseline is beside.
const LARGE: usize = 1 << 20;

/// The figures of all sizes of a cell.
pub(super) fn measure(
    places: &Places,
    cell: &Cell,
    traffic: Option<Traffic>,
    mtu: u32,
    quick: bool,
) -> Result<Vec<(u64, Figures)>> {
    let seconds = seconds(cell.experiment, quick);
    if let Carrier::Programs(suite, provider) = cell.mode.carrier {
        let netdev = provider.name();
        let of = |&x: &u64| {
            let step = |measure| Step { measure, size: x as usize, seconds };
            let steps: Vec<Step> = suite.measures(x, quick)?.into_iter().map(step).collect();
            Ok((x, by_programs(places, cell.mode, (suite, netdev, mtu), &steps)?))
        };
        return cell.xs.iter().map(of).collect();
    }
    // From the largest on: receives for large SENDs take small ones, too.
    let mut xs = cell.xs.clone();
    xs.sort_unstable_by(|a, b| b.cmp(a));
    let steps = |measures: &[Measure]| -> Vec<Step> {
        let at = |measure| xs.iter().map(move |size| (measure, *size as usize));
        let all = measures.iter().copied().flat_map(at);
        all.map(|(measure, size)| Step { measure, size, seconds }).collect()
    };
    let cc = || {
        let known = Congestion::available().first().copied();
        known.ok_or_else(|| Failure::Failed("the kernel has neither cubic nor bbr".into()))
    };
    let mut baseline = None;
    let work = match (traffic, cell.mode.carrier) {
        (Some(Traffic::Verbs(device)), _) => {
            if xs.contains(&(LARGE as u64)) {
                baseline = raw(places, cell.mode, &device, mtu, 2.0 * seconds);
            }
            let measures = [Measure::WriteBw, Measure::SendBw, Measure::ReadBw, Measure::WriteLat];
            Work::Verbs { device, mtu, qps: 1, steps: steps(&measures) }
        }
        (_, Carrier::Tcp { spin }) => {
            let mode = TcpMode { cc: cc()?, spin };
            Work::Tcp(mode, steps(&[Measure::WriteBw, Measure::WriteLat]))
        }
        _ => match steps(&[Measure::WriteBw])[..] {
            [step] => Work::Iperf3(cc()?, step),
            _ => return Err(Failure::Failed("iperf3 has one size at once".into())),
        },
    };
    let mut points: BTreeMap<u64, Figures> = BTreeMap::new();
    for Figure { measure, size, value } in places.figures(cell.mode.link, &work)? {
        if let Some(name) = figure_name(measure) {
            points.entry(size as u64).or_default().insert(name.into(), value);
        }
    }
    if let (Some(gbps), Some(large)) = (baseline, points.get_mut(&(LARGE as u64))) {
        large.insert("raw_gbps".into(), gbps);
    }
    Ok(points.into_iter().collect())
}

/// The figures that unmodified programs print, one after the other.
fn by_programs(
    places: &Places,
    mode: &Mode,
    (suite, netdev, mtu): (Suite, &str, u32),
    steps: &[Step],
) -> Result<Figures> {
    let mut figures = Figures::new();
    for &step in steps {
        let foreign = Foreign { suite, netdev: netdev.into(), mtu, step };
        for Figure { measure, value, .. } in places.figures(mode.link, &Work::Foreign(foreign))? {
            figures.extend(figure_name(measure).map(|name| (name.to_owned(), value)));
        }
    }
    Ok(figures)
}

/// The raw baseline of large WRITEs, if the device has one that works.
fn raw(places: &Places, mode: &Mode, device: &Device, mtu: u32, seconds: f64) -> Option<f64> {
    let Device::Software { backend, handed: false, contained: false, .. } = device else {
        return None;
    };
    let step = Step { measure: Measure::WriteBw, size: LARGE, seconds };
    let (kind, depth) = (Kind::Flood, depth(&step, 1));
    let task = Task { kind, message: LARGE, mtu: mtu as usize, depth, seconds };
    let carried = places.carried(mode.link, Wire::Baseline(backend.clone()), vec![task]);
    match carried.ok()?.first()?.1 {
        Raw::Flood { gbps, .. } => Some(gbps),
        Raw::PingPong { .. } => None,
    }
}
