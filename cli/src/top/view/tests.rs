use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::stat::Limit;
use crate::stat::rates::QueueRates;

fn pair(qpn: u32, gbps: f64, held_by_peer: u32) -> QueuePairRates {
    QueuePairRates {
        qpn,
        peer: Some("fd00:1234:5678:9abc:def0:1234:5678:9abc".parse().expect("an address")),
        peer_qpn: 0xFF_FFFF,
        service: "RC".into(),
        state: "RTS".into(),
        tx_gbps: gbps,
        rx_gbps: 0.0,
        tx_mops: 0.5,
        rx_mops: 0.0,
        retransmitted: 0,
        rnr_received: 0,
        held_by_peer,
        held_by_network: 0,
    }
}

fn container(name: &str, tx_gbps: f64, retransmitted: u64) -> ContainerRates {
    ContainerRates {
        name: name.to_owned(),
        id: None,
        netdevs: vec!["packet".into()],
        tx_gbps,
        rx_gbps: 1.0,
        tx_mops: 0.1,
        rx_mops: 0.2,
        retransmitted,
        rnr_received: 0,
        rnr_sent: 0,
        cnp_received: 0,
        cnp_sent: 0,
        undriven_us: 0,
        drops: Default::default(),
        limits: Vec::new(),
        queues: Vec::new(),
        unread: 0,
        queue_pairs: vec![pair(17, 2.0, 3), pair(18, 5.0, 0)],
    }
}

fn rates(containers: Vec<ContainerRates>) -> News {
    News { of: None, rates: Ok(Rates { seconds: 1.0, containers }) }
}

fn view() -> View {
    let mut view = View::new("the agent at /x".into(), Sort::Tx, None);
    view.hear(rates(vec![container("veth-a", 1.0, 9), container("veth-b", 2.0, 0)]));
    view
}

fn lines(view: &mut View, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("memory");
    terminal.draw(|frame| view.draw(frame)).expect("drawn");
    let cells = terminal.backend().buffer().content().chunks(width.max(1).into());
    cells.map(|row| row.iter().map(ratatui::buffer::Cell::symbol).collect::<String>()).collect()
}

#[test]
fn lines_are_in_the_order_that_is_asked_for() {
    let mut view = view();
    let order = |view: &mut View| {
        let text = lines(view, 100, 10).join("\n");
        text.find("veth-a").expect("one") < text.find("veth-b").expect("the other")
    };
    assert!(!order(&mut view), "more is sent by b");
    view.press(Key::Reverse);
    assert!(order(&mut view));
    view.press(Key::Reverse);
    while view.sort != Sort::Retrans {
        view.press(Key::SortRight);
    }
    assert!(order(&mut view));
    while view.sort != Sort::Name {
        view.press(Key::SortLeft);
    }
    assert!(order(&mut view));
}

#[test]
fn a_container_is_opened_and_shows_its_queue_pairs() {
    let mut view = view();
    (0..3).for_each(|_| view.press(Key::Down));
    view.press(Key::Open);
    assert_eq!(view.opened(), Some("veth-a"));
    assert!(lines(&mut view, 80, 10).join("\n").contains("first figures"));
    // Late news of all are not of this one.
    view.hear(rates(vec![container("veth-a", 1.0, 9)]));
    assert!(view.rates.is_none());
    let mut one = container("veth-a", 1.0, 9);
    one.undriven_us = 12_345;
    one.limits = vec![
        Limit { name: "egress_rate".into(), current: None, max: 1_000_000_000 },
        Limit { name: "hca_object".into(), current: Some(5), max: 5 },
        Limit { name: "mr_bytes".into(), current: Some(4), max: 5 },
    ];
    one.queues = vec![QueueRates { name: "egress_rate", backlog_bytes: 77, delayed: 8 }];
    one.drops = [("egress_rate".to_owned(), 3)].into();
    let rates = Rates { seconds: 1.0, containers: vec![one] };
    view.hear(News { of: Some("veth-a".into()), rates: Ok(rates) });
    let text = lines(&mut view, 300, 10);
    for words in [
        "limit hca_object=5; egress_rate of 1.00 Gb/s: 8 waited, 77 B queued",
        "dropped egress_rate=3; no processor 12.345ms in 1.0 s",
    ] {
        assert!(text[1].contains(words), "{text:#?}");
    }
    assert!(!text[1].contains("mr_bytes"), "{text:#?}");
    assert!(text[3].starts_with("18 ") && text[4].starts_with("17 "), "{text:#?}");
    assert!(text[3].contains("RC RTS"), "{text:#?}");
    assert!(text[4].contains("peer's room 3; no processor"), "{text:#?}");
    view.press(Key::Close);
    assert_eq!((view.opened(), view.count()), (None, 0));
}

/// No size fails, and each shows the name of the container that is selected.
#[test]
fn every_size_is_drawn() {
    for opened in [false, true] {
        let mut view = view();
        if opened {
            view.press(Key::Open);
            let rates = Rates { seconds: 1.0, containers: vec![container("veth-b", 1.0, 9)] };
            view.hear(News { of: view.opened.clone(), rates: Ok(rates) });
        }
        for width in (1..120).chain([500]) {
            for height in [1, 2, 3, 4, 5, 10, 300] {
                let text = lines(&mut view, width, height);
                if width >= 20 && height >= 5 {
                    assert!(text[if opened { 3 } else { 2 }].trim().len() >= 2, "{text:#?}");
                }
            }
        }
        let text = lines(&mut view, 20, 10);
        let row = if opened { "18       5.00" } else { "veth-b       2.00" };
        assert!(text.iter().any(|line| line.starts_with(row)), "{text:#?}");
    }
}

#[test]
fn an_agent_that_goes_away_is_said_and_one_that_comes_back_goes_on() {
    let mut view = view();
    view.hear(News { of: None, rates: Err("no agent answers at /x".into()) });
    let text = lines(&mut view, 60, 10);
    assert!(text[9].starts_with("0 s: no agent answers at /x"), "{text:#?}");
    assert!(text[2].starts_with("veth-b"), "the last figures stay");
    view.hear(rates(vec![container("veth-c", 1.0, 9)]));
    let text = lines(&mut view, 60, 10);
    assert!(text[9].starts_with("q quit") && text[2].starts_with("veth-c"), "{text:#?}");
}
