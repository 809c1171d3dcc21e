//! The state of the view, and its picture.

use std::cmp::Ordering;
use std::time::Instant;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::Line;
use ratatui::widgets::{Row, Table, TableState};

use super::gather::News;
use super::held;
use super::keys::Key;
use crate::output::digits;
use crate::stat::rates::{ContainerRates, QueuePairRates, Rates};

const KEYS: &str = "q quit  Enter open  Esc close  < > sort  r reverse";
/// Lines of a page: a key knows no height of the terminal.
const PAGE: usize = 10;

/// A column to sort by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Sort {
    /// The container's name, or the queue pair's number
    Name,
    /// Bytes sent
    Tx,
    /// Bytes received
    Rx,
    /// Operations, both ways
    Ops,
    /// Packets sent again
    Retrans,
    /// Packets dropped; of a queue pair, turns in which the peer had no room
    Drops,
    /// The time without a processor
    Undriven,
}

const ORDER: [Sort; 7] =
    [Sort::Name, Sort::Tx, Sort::Rx, Sort::Ops, Sort::Retrans, Sort::Drops, Sort::Undriven];

/// Heads and least widths. A narrow terminal shows as many as there is room for.
type Columns = [(&'static str, u16); 7];
const CONTAINERS: Columns = [
    ("container", 12),
    ("tx_Gb/s", 7),
    ("rx_Gb/s", 7),
    ("op/s", 9),
    ("retrans", 7),
    ("netdev", 10),
    ("held back by", 30),
];
const QUEUE_PAIRS: Columns = [
    ("qpn", 8),
    ("tx_Gb/s", 7),
    ("rx_Gb/s", 7),
    ("state", 6),
    ("peer", 24),
    ("op/s", 9),
    ("held back by", 30),
];

/// A container, or a queue pair of one.
type Subject = (String, Option<u32>);

/// The view.
pub(super) struct View {
    source: String,
    sort: Sort,
    reversed: bool,
    /// The container that is opened.
    opened: Option<String>,
    /// The last figures of the same, in the order of the lines.
    rates: Option<Rates>,
    /// Since when there are none, and why.
    fault: Option<(Instant, String)>,
    lines: TableState,
}

impl View {
    pub(super) fn new(source: String, sort: Sort, opened: Option<String>) -> Self {
        let lines = TableState::new().with_selected(0);
        Self { source, sort, reversed: false, opened, rates: None, fault: None, lines }
    }

    /// The container that is opened.
    pub(super) fn opened(&self) -> Option<&str> {
        self.opened.as_deref()
    }

    pub(super) fn hear(&mut self, news: News) {
        // Of another one than is shown now.
        if news.of != self.opened {
            return;
        }
        match news.rates {
            Ok(rates) => {
                let selected = self.selected();
                (self.rates, self.fault) = (Some(rates), None);
                self.arrange(selected.as_ref());
            }
            Err(why) => {
                let since = self.fault.as_ref().map_or_else(Instant::now, |(since, _)| *since);
                self.fault = Some((since, why));
            }
        }
    }

    /// Changes the view. Quitting is not its business.
    pub(super) fn press(&mut self, key: Key) {
        let at = self.lines.selected().unwrap_or(0);
        let to = |key: usize| key.min(self.count().saturating_sub(1));
        match key {
            Key::Up => self.lines.select(Some(at.saturating_sub(1))),
            Key::Down => self.lines.select(Some(to(at + 1))),
            Key::PageUp => self.lines.select(Some(at.saturating_sub(PAGE))),
            Key::PageDown => self.lines.select(Some(to(at + PAGE))),
            Key::Open if self.opened.is_none() => {
                let rates = self.rates.as_ref();
                let name = rates.and_then(|it| Some(it.containers.get(at)?.name.clone()));
                if name.is_some() {
                    self.show(name);
                }
            }
            Key::Close if self.opened.is_some() => self.show(None),
            Key::SortLeft => self.sort_by(ORDER.len() - 1),
            Key::SortRight => self.sort_by(1),
            Key::Reverse => {
                let selected = self.selected();
                self.reversed = !self.reversed;
                self.arrange(selected.as_ref());
            }
            Key::Open | Key::Close | Key::Quit | Key::Interrupt => {}
        }
    }

    fn show(&mut self, container: Option<String>) {
        (self.opened, self.rates, self.fault) = (container, None, None);
        self.lines.select(Some(0));
    }

    fn sort_by(&mut self, further: usize) {
        let at = ORDER.iter().position(|it| *it == self.sort).unwrap_or(0);
        let selected = self.selected();
        self.sort = ORDER[(at + further) % ORDER.len()];
        self.arrange(selected.as_ref());
    }

    /// The containers, or queue pairs, of the lines.
    fn subjects(&self) -> Vec<Subject> {
        let containers = self.rates.iter().flat_map(|rates| &rates.containers);
        let subject = |name: &String, qpn| (name.clone(), qpn);
        match &self.opened {
            Some(_) => containers
                .flat_map(|it| it.queue_pairs.iter().map(|qp| subject(&it.name, Some(qp.qpn))))
                .collect(),
            None => containers.map(|it| subject(&it.name, None)).collect(),
        }
    }

    fn count(&self) -> usize {
        self.subjects().len()
    }

    fn selected(&self) -> Option<Subject> {
        self.subjects().into_iter().nth(self.lines.selected()?)
    }

    /// Sorts, and selects `selected` if it is still there.
    fn arrange(&mut self, selected: Option<&Subject>) {
        let (sort, reversed) = (self.sort, self.reversed);
        let at = self.lines.selected().unwrap_or(0);
        let Some(rates) = &mut self.rates else { return };
        let ordered = |order: Ordering| if reversed { order.reverse() } else { order };
        rates.containers.sort_by(|a, b| {
            let by = key(b, sort).total_cmp(&key(a, sort));
            ordered(by).then_with(|| ordered(a.name.cmp(&b.name)))
        });
        for container in &mut rates.containers {
            container.queue_pairs.sort_by(|a, b| {
                let by = key_of_pair(b, sort).total_cmp(&key_of_pair(a, sort));
                ordered(by).then_with(|| ordered(a.qpn.cmp(&b.qpn)))
            });
        }
        let subjects = self.subjects();
        let found = subjects.iter().position(|it| Some(it) == selected);
        self.lines.select(Some(found.unwrap_or(at.min(subjects.len().saturating_sub(1)))));
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let above = if self.opened.is_some() { 2 } else { 1 };
        let parts = [Constraint::Length(above), Constraint::Fill(1), Constraint::Length(1)];
        let [top, middle, bottom] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(ratatui::text::Text::from(self.head()), top);
        self.draw_lines(frame, middle);
        let bottom_line = match &self.fault {
            Some((since, why)) => {
                let seconds = since.elapsed().as_secs();
                Line::from(format!("{seconds} s: {why}")).fg(Color::Red)
            }
            None if self.rates.is_none() => Line::from("the first figures come after an interval"),
            None => Line::from(KEYS).dim(),
        };
        frame.render_widget(bottom_line, bottom);
    }

    /// The lines above the table.
    fn head(&self) -> Vec<Line<'_>> {
        let by = format!("{:?}", self.sort).to_lowercase();
        let Some(name) = &self.opened else {
            let count = self.count();
            return vec![
                Line::from(format!("{count} containers by {by}, from {}", self.source)).bold(),
            ];
        };
        let rates = self.rates.as_ref();
        let held = rates.and_then(|it| Some(held::container(it.containers.first()?, it.seconds)));
        let held = match held {
            Some(all) if all.is_empty() => "no limit, queue or drop holds it back".to_owned(),
            Some(all) => all.join("; "),
            None => String::new(),
        };
        let count = self.count();
        let text = format!("{name}: {count} queue pairs by {by}, from {}", self.source);
        vec![Line::from(text).bold(), Line::from(held)]
    }

    fn draw_lines(&mut self, frame: &mut Frame<'_>, area: Rect) {
        let columns = if self.opened.is_some() { &QUEUE_PAIRS } else { &CONTAINERS };
        let fitting = fitting(columns, area.width);
        let rates = self.rates.iter();
        let rows = rates.flat_map(|rates| {
            let all = rates.containers.iter();
            all.flat_map(|it| match &self.opened {
                Some(_) => {
                    let all = it.queue_pairs.iter();
                    all.map(|qp| of_pair(qp, it, rates.seconds)).collect::<Vec<_>>()
                }
                None => vec![of_container(it, rates.seconds)],
            })
        });
        let rows = rows.map(|cells| Row::new(cells.into_iter().take(fitting.len())));
        let heads = columns.iter().take(fitting.len()).map(|(head, _)| *head);
        let table = Table::new(rows, fitting.clone())
            .header(Row::new(heads).underlined())
            .row_highlight_style(Style::new().reversed());
        frame.render_stateful_widget(table, area, &mut self.lines);
    }
}

/// As many columns as there is room for, and the last of them with all the rest. The first one is
/// there in any case, and grows to what names need.
fn fitting(columns: &Columns, width: u16) -> Vec<Constraint> {
    let mut taken = 0;
    let fits = |(_, least): &&(&str, u16)| {
        taken += least + 1;
        taken <= width + 1
    };
    let count = columns.iter().take_while(fits).count().max(1);
    let constraint = |(at, (_, least)): (usize, &(&str, u16))| match at {
        _ if at + 1 == count => Constraint::Fill(1),
        0 if width >= 80 => Constraint::Length(18),
        _ => Constraint::Length(*least),
    };
    columns.iter().take(count).enumerate().map(constraint).collect()
}

fn of_container(it: &ContainerRates, seconds: f64) -> Vec<String> {
    vec![
        it.name.clone(),
        digits(it.tx_gbps),
        digits(it.rx_gbps),
        per_second(it.tx_mops + it.rx_mops),
        it.retransmitted.to_string(),
        it.netdevs.join(","),
        held::container(it, seconds).join("; "),
    ]
}

fn of_pair(it: &QueuePairRates, of: &ContainerRates, seconds: f64) -> Vec<String> {
    let peer = it.peer.map(|peer| format!("{peer} {}", it.peer_qpn));
    vec![
        it.qpn.to_string(),
        digits(it.tx_gbps),
        digits(it.rx_gbps),
        format!("{} {}", it.service, it.state),
        peer.unwrap_or_else(|| "-".to_owned()),
        per_second(it.tx_mops + it.rx_mops),
        held::queue_pair(it, of, seconds).join("; "),
    ]
}

fn per_second(millions: f64) -> String {
    format!("{:.0}", millions * 1e6)
}

fn key(it: &ContainerRates, sort: Sort) -> f64 {
    match sort {
        Sort::Name => 0.0,
        Sort::Tx => it.tx_gbps,
        Sort::Rx => it.rx_gbps,
        Sort::Ops => it.tx_mops + it.rx_mops,
        Sort::Retrans => it.retransmitted as f64,
        Sort::Drops => it.drops.values().sum::<u64>() as f64,
        Sort::Undriven => it.undriven_us as f64,
    }
}

fn key_of_pair(it: &QueuePairRates, sort: Sort) -> f64 {
    match sort {
        // Those of one device have one driver.
        Sort::Name | Sort::Undriven => 0.0,
        Sort::Tx => it.tx_gbps,
        Sort::Rx => it.rx_gbps,
        Sort::Ops => it.tx_mops + it.rx_mops,
        Sort::Retrans => f64::from(it.retransmitted),
        Sort::Drops => f64::from(it.held_by_peer),
    }
}

#[cfg(test)]
mod tests;
