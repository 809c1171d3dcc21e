use super::*;

const G: u64 = 1_000_000_000;

fn out(rates: &[u64]) -> Vec<Interface> {
    let min = |rate: &u64| Rates { egress: rate * G, ingress: 0 };
    rates.iter().map(|rate| Interface { min: min(rate), max: None }).collect()
}

fn placed(uplink: &str, rate: u64) -> Vec<Placed> {
    let min = Rates { egress: rate * G, ingress: 0 };
    vec![Placed { uplink: uplink.to_owned(), min, max: None }]
}

fn speeds(rates: &[u64]) -> Option<Result<Vec<Uplink>, Malformed>> {
    let named = rates.iter().enumerate();
    Some(Ok(named.map(|(at, rate)| Uplink::new(&format!("u{at}"), rate * G)).collect()))
}

/// Two nodes of one uplink of 10G each, `a` and `b`, and a node `c` without any.
fn ledger() -> Ledger {
    let mut ledger = Ledger::default();
    for (name, uplinks) in [("a", speeds(&[10])), ("b", speeds(&[10])), ("c", None)] {
        ledger.node(name, uplinks);
        ledger.node_listed(name);
    }
    ledger.nodes_end();
    ledger.pods_begin();
    ledger.pods_end();
    ledger
}

fn fits(ledger: &Ledger, rate: u64, node: &str) -> bool {
    ledger.fits("asks", &out(&[rate]), node, STEPS).is_ok()
}

/// The free rate at a node, in whole G.
fn free(ledger: &Ledger, node: &str) -> u64 {
    (0..=10).rev().find(|rate| fits(ledger, *rate, node)).unwrap()
}

#[test]
fn nothing_is_answered_before_both_lists_are_complete() {
    let mut ledger = Ledger::default();
    ledger.node("a", speeds(&[10]));
    ledger.pods_end();
    assert!(ledger.ready().is_err());
    assert!(ledger.reserve("p", &out(&[1]), "a").is_err());
    ledger.nodes_end();
    assert_eq!(ledger.ready(), Ok(()));
}

#[test]
fn a_user_who_changes_the_places_before_the_watch_shows_them_makes_no_room() {
    for (answered, shown) in
        [(true, None), (true, Some(vec![])), (false, None), (false, Some(placed("u0", 0)))]
    {
        let mut ledger = ledger();
        let reserved = ledger.reserve("p", &out(&[7]), "a").unwrap();
        if answered {
            assert!(ledger.answered("p", &reserved, Outcome::Done));
        }
        ledger.pod("p", "a", shown);
        assert_eq!(free(&ledger, "a"), 3);
        ledger.pod_gone("p");
        assert_eq!(free(&ledger, "a"), 10);
    }
}

#[test]
fn a_reservation_counts_from_its_bind_until_the_pod_has_ended() {
    let mut ledger = ledger();
    let first = ledger.reserve("p", &out(&[7]), "a").unwrap();
    assert_eq!(first.placed, placed("u0", 7));
    assert_eq!((free(&ledger, "a"), free(&ledger, "b")), (3, 10));
    assert!(ledger.reserve("q", &out(&[4]), "a").is_err());
    ledger.reserve("q", &out(&[3]), "a").unwrap();
    assert_eq!(free(&ledger, "a"), 0);

    assert!(ledger.answered("p", &first, Outcome::Done));
    ledger.pod("p", "a", Some(placed("u0", 7)));
    assert_eq!(free(&ledger, "a"), 0);
    ledger.pod_gone("p");
    assert_eq!(free(&ledger, "a"), 7);
}

#[test]
fn a_refused_bind_gives_back_and_an_unknown_one_does_not() {
    let mut ledger = ledger();
    let refused = ledger.reserve("p", &out(&[7]), "a").unwrap();
    assert!(!ledger.answered("p", &refused, Outcome::Refused));
    assert_eq!(free(&ledger, "a"), 10);

    let unknown = ledger.reserve("p", &out(&[7]), "a").unwrap();
    assert!(ledger.answered("p", &unknown, Outcome::Unknown));
    assert_eq!(free(&ledger, "a"), 3);
    // A second bind is refused because the first one has bound the pod.
    let again = ledger.reserve("p", &out(&[7]), "a").unwrap();
    assert_eq!(again.placed, unknown.placed);
    assert!(ledger.answered("p", &again, Outcome::Refused));
    assert_eq!(free(&ledger, "a"), 3);
    // Only looks after the last bind count.
    ledger.forget("p", unknown.attempt);
    assert_eq!(free(&ledger, "a"), 3);
    ledger.forget("p", again.attempt);
    assert_eq!(free(&ledger, "a"), 10);
}

#[test]
fn one_pod_is_at_one_node() {
    let mut ledger = ledger();
    let first = ledger.reserve("p", &out(&[7]), "a").unwrap();
    for node in ["a", "b"] {
        let error = ledger.reserve("p", &out(&[7]), node).unwrap_err();
        assert!(error.contains("under way"), "{error}");
    }
    assert!(ledger.fits("p", &out(&[7]), "a", STEPS).is_ok());
    assert!(ledger.fits("p", &out(&[7]), "b", STEPS).unwrap_err().with_others_gone);
    ledger.answered("p", &first, Outcome::Unknown);
    assert!(ledger.reserve("p", &out(&[7]), "b").is_err());
    // Another process has bound it there.
    ledger.pod("p", "b", Some(placed("u0", 7)));
    assert_eq!((free(&ledger, "a"), free(&ledger, "b")), (10, 3));
    assert!(ledger.reserve("p", &out(&[7]), "b").unwrap_err().contains("bound to b"));
}

#[test]
fn a_list_ends_what_it_lacks_but_not_what_is_under_way() {
    let mut ledger = ledger();
    ledger.pod("old", "a", Some(placed("u0", 1)));
    ledger.pod("stays", "a", Some(placed("u0", 2)));
    let assumed = ledger.reserve("assumed", &out(&[1]), "a").unwrap();
    ledger.answered("assumed", &assumed, Outcome::Done);
    ledger.reserve("under way", &out(&[1]), "a").unwrap();
    assert_eq!(free(&ledger, "a"), 5);
    ledger.pods_begin();
    ledger.pod_listed("stays");
    ledger.pod("stays", "a", Some(placed("u0", 2)));
    // Before its end a list ends nothing.
    assert_eq!(free(&ledger, "a"), 5);
    ledger.pods_end();
    assert_eq!(free(&ledger, "a"), 6);
}

#[test]
fn an_annotation_that_changes_makes_no_room() {
    let mut ledger = ledger();
    ledger.pod("p", "a", Some(placed("u0", 7)));
    for changed in [Some(placed("u0", 0)), Some(placed("other", 7)), None] {
        ledger.pod("p", "a", changed);
        assert_eq!(free(&ledger, "a"), 3);
    }
    // A pod that another scheduler binds without places may be one whose places were taken away.
    let reserved = ledger.reserve("q", &out(&[3]), "a").unwrap();
    ledger.pod("q", "a", None);
    assert!(!ledger.answered("q", &reserved, Outcome::Refused));
    assert_eq!(free(&ledger, "a"), 0);
    // Where no bind went there it holds none.
    ledger.pod("r", "b", None);
    assert_eq!(free(&ledger, "b"), 10);
}

#[test]
fn a_node_that_comes_again_has_its_pods() {
    let mut ledger = ledger();
    ledger.pod("p", "a", Some(placed("u0", 7)));
    ledger.node_gone("a");
    assert!(ledger.fits("q", &out(&[1]), "a", STEPS).unwrap_err().with_others_gone);
    ledger.node("a", speeds(&[10]));
    assert_eq!(free(&ledger, "a"), 3);
    // The list lacks it; its pod ends later.
    ledger.nodes_begin();
    ledger.node_listed("b");
    ledger.nodes_end();
    assert!(!fits(&ledger, 1, "a"));
    ledger.pod_gone("p");
    assert_eq!(ledger.nodes.len(), 1, "{ledger:?}");
    assert!(ledger.places.is_empty());
}

#[test]
fn an_uplink_that_became_slower_takes_no_more() {
    let mut ledger = ledger();
    ledger.pod("p", "a", Some(placed("u0", 7)));
    ledger.node("a", speeds(&[5]));
    assert_eq!(free(&ledger, "a"), 0);
    ledger.pod_gone("p");
    assert_eq!(free(&ledger, "a"), 5);
}

#[test]
fn a_node_that_would_never_do_says_so() {
    let mut ledger = ledger();
    ledger.pod("p", "a", Some(placed("u0", 7)));
    ledger.node("bad", Some(rocinante_placement::uplinks("[")));
    let unfit = |wanted: &[u64], node| {
        let unfit = ledger.fits("q", &out(wanted), node, STEPS).unwrap_err();
        (unfit.with_others_gone, unfit.reason)
    };
    assert_eq!(unfit(&[4], "a"), (true, "not enough free RDMA bandwidth".into()));
    assert_eq!(unfit(&[11], "a"), (false, "not enough free RDMA bandwidth".into()));
    assert_eq!(unfit(&[1], "c"), (false, "the node has no RDMA uplinks".into()));
    assert_eq!(unfit(&[1], "new"), (true, "the node is not known yet".into()));
    assert!(unfit(&[1], "bad").1.starts_with("the node's RDMA uplinks: "));
}

#[test]
fn the_fuller_node_scores_higher() {
    let mut ledger = ledger();
    ledger.pod("p", "a", Some(placed("u0", 5)));
    assert_eq!((ledger.score(&out(&[2]), "a"), ledger.score(&out(&[2]), "b")), (7, 2));
    assert_eq!((ledger.score(&out(&[20]), "a"), ledger.score(&out(&[2]), "c")), (10, 0));
}

#[test]
fn hostile_places_take_everything_and_overflow_nothing() {
    let mut ledger = ledger();
    let most = Rates { egress: u64::MAX, ingress: u64::MAX };
    let all = Placed { uplink: "u0".into(), min: most, max: None };
    ledger.pod("p", "a", Some(vec![all.clone(), all]));
    assert_eq!((free(&ledger, "a"), free(&ledger, "b")), (0, 10));
    let wanted = vec![Interface { min: most, max: None }; 2];
    assert_eq!(ledger.score(&wanted, "b"), 10);
}

/// Every arrangement.
fn any_fits(free: &mut [u64], wanted: &[u64]) -> bool {
    let Some((first, others)) = wanted.split_first() else { return true };
    (0..free.len()).any(|at| {
        let Some(left) = free[at].checked_sub(*first) else { return false };
        let before = std::mem::replace(&mut free[at], left);
        let fitted = any_fits(free, others);
        free[at] = before;
        fitted
    })
}

/// Clusters of random nodes and pods, each asked for random interfaces: what fits is what a solver
/// finds that tries everything, and what `reserve` gives is never more than there is.
/// ROCINANTE_CLUSTERS has another number than 2000.
#[test]
fn random_clusters_are_judged_as_by_trying_everything() {
    let clusters = std::env::var("ROCINANTE_CLUSTERS");
    let clusters = clusters.map_or(2000, |it| it.parse().expect("ROCINANTE_CLUSTERS"));
    let mut fitted = [0_u32; 2];
    for seed in 0..clusters {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut ledger = Ledger::default();
        let mut frees: Vec<Vec<u64>> = Vec::new();
        for node in 0..random.usize(1..=4) {
            let each: Vec<u64> = (0..random.usize(1..=4)).map(|_| random.u64(1..=12)).collect();
            let name = format!("n{node}");
            ledger.node(&name, speeds(&each));
            ledger.node_listed(&name);
            frees.push(each);
        }
        ledger.nodes_end();
        ledger.pods_end();
        for pod in 0..random.usize(1..=6) {
            let uid = format!("p{pod}");
            let wanted: Vec<u64> = (0..random.usize(1..=5)).map(|_| random.u64(0..=8)).collect();
            let mut bound = None;
            for (at, free) in frees.iter_mut().enumerate() {
                let node = format!("n{at}");
                let expected = any_fits(free, &wanted);
                let found = ledger.fits(&uid, &out(&wanted), &node, STEPS).is_ok();
                assert_eq!(found, expected, "seed {seed}: {wanted:?} on {free:?}");
                fitted[usize::from(found)] += 1;
                if found && bound.is_none() {
                    bound = Some((node, at));
                }
            }
            let Some((node, at)) = bound else { continue };
            let reserved = ledger.reserve(&uid, &out(&wanted), &node).unwrap();
            for (placed, wanted) in reserved.placed.iter().zip(&wanted) {
                assert_eq!(placed.min.egress, wanted * G, "seed {seed}");
                let uplink: usize = placed.uplink[1..].parse().unwrap();
                let left = frees[at][uplink].checked_sub(*wanted);
                frees[at][uplink] = left.unwrap_or_else(|| panic!("seed {seed}: over-committed"));
            }
            let outcome = match random.u8(0..3) {
                0 => Outcome::Done,
                1 => Outcome::Unknown,
                _ => Outcome::Refused,
            };
            ledger.answered(&uid, &reserved, outcome);
            if outcome == Outcome::Refused {
                for placed in &reserved.placed {
                    let uplink: usize = placed.uplink[1..].parse().unwrap();
                    frees[at][uplink] += placed.min.egress / G;
                }
            }
        }
    }
    assert!(fitted.iter().all(|count| *count > 1000), "{fitted:?}");
}
