//! The promised parts of each node's uplinks, by pod. No I/O: the API's events and the
//! schedulers' requests come in as values.
//!
//! A pod has one entry from the moment at which a bind reserves for it until the API says that it
//! has ended. `UnderWay`: its bind is at the API. `Assumed`: the bind was answered, or its outcome
//! is unknown, and the watch has not shown the pod yet. `Bound`: the watch has shown it. All three
//! count in full.

use std::collections::{BTreeMap, HashMap, HashSet};

use rocinante_placement::{Interface, Malformed, Placed, Rates, Refused, STEPS, Uplink, place};

/// The greatest score of a node: `MaxExtenderPriority` of kube-scheduler's extender/v1.
const SCORE_MAX: u64 = 10;

/// The rows of all nodes, and which of the API's lists they have.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    nodes: HashMap<String, Node>,
    /// The node of each pod that has an entry, by the pod's UID.
    places: HashMap<String, String>,
    /// Names and UIDs of a list of the API's that is not complete yet.
    listing: Listing,
    nodes_listed: bool,
    pods_listed: bool,
    /// Binds until now.
    attempts: u64,
}

#[derive(Debug, Default)]
struct Listing {
    nodes: HashSet<String>,
    pods: HashSet<String>,
}

#[derive(Debug, Default)]
struct Node {
    /// Whether there is such a node. One that is gone stays as long as its pods.
    is_there: bool,
    /// `None`: it has no such annotation.
    uplinks: Option<Result<Vec<Uplink>, Malformed>>,
    /// By the pod's UID.
    pods: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    placed: Vec<Placed>,
    state: State,
    /// The last bind, 0 if it was another process's.
    attempt: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    UnderWay,
    Assumed,
    Bound,
}

/// How the API answered a bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The pod is bound.
    Done,
    /// This request bound nothing.
    Refused,
    /// No answer, or one that does not say: the pod may be bound.
    Unknown,
}

/// A reservation whose bind goes to the API.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reserved {
    pub(crate) placed: Vec<Placed>,
    /// Its number, which no other bind has.
    pub(crate) attempt: u64,
    /// Whether no earlier bind of the pod may have reached the API.
    first: bool,
}

/// Why a node is not for a pod.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unfit {
    pub(crate) reason: String,
    /// Whether the node would do without other pods.
    pub(crate) with_others_gone: bool,
}

impl Unfit {
    fn now(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), with_others_gone: true }
    }

    fn ever(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), with_others_gone: false }
    }
}

impl Node {
    fn uplinks(&self) -> Result<&[Uplink], Unfit> {
        match &self.uplinks {
            None => Err(Unfit::ever("the node has no RDMA uplinks")),
            Some(Ok(uplinks)) => Ok(uplinks),
            Some(Err(error)) => Err(Unfit::ever(format!("the node's RDMA uplinks: {error}"))),
        }
    }

    /// Sums the taken rates anew: the entries are the truth.
    fn settle(&mut self) {
        let Some(Ok(uplinks)) = &mut self.uplinks else { return };
        for uplink in uplinks {
            let placed = self.pods.values().flat_map(|entry| &entry.placed);
            let there = placed.filter(|placed| placed.uplink == uplink.name);
            uplink.taken = there.fold(Rates::default(), |sum, placed| sum.with(placed.min));
        }
    }
}

impl Ledger {
    /// Error: the lists of the API are not complete yet.
    pub(crate) fn ready(&self) -> Result<(), String> {
        match self.nodes_listed && self.pods_listed {
            true => Ok(()),
            false => {
                Err("the taken rates are not known yet: the API's lists are being read".into())
            }
        }
    }

    /// Whether a pod may be bound to a node. A pod whose bind is not answered for good stays with
    /// its node.
    pub(crate) fn fits(
        &self,
        uid: &str,
        wanted: &[Interface],
        name: &str,
        steps: u32,
    ) -> Result<(), Unfit> {
        if let Some(node) = self.places.get(uid) {
            return match node == name {
                true => Ok(()),
                false => Err(Unfit::now(format!("a bind of the pod to {node} is under way"))),
            };
        }
        let uplinks = self.uplinks(name)?;
        match place(uplinks, wanted, steps) {
            Ok(_) => Ok(()),
            Err(Refused::Full) => {
                let empty: Vec<Uplink> = uplinks.iter().cloned().map(emptied).collect();
                match place(&empty, wanted, steps) {
                    Err(Refused::Full) => Err(Unfit::ever(Refused::Full.to_string())),
                    Ok(_) | Err(_) => Err(Unfit::now(Refused::Full.to_string())),
                }
            }
            Err(Refused::Undecided) => Err(Unfit::now(Refused::Undecided.to_string())),
            Err(refused) => Err(Unfit::ever(refused.to_string())),
        }
    }

    /// How full the pod makes the node, up to [`SCORE_MAX`]: best fit leaves the emptiest nodes to
    /// large pods.
    pub(crate) fn score(&self, wanted: &[Interface], name: &str) -> u64 {
        let Ok(uplinks) = self.uplinks(name) else { return 0 };
        let sum = |rates: &mut dyn Iterator<Item = u64>| rates.map(u128::from).sum::<u128>();
        let speed = sum(&mut uplinks.iter().map(|it| it.speed.egress));
        let taken = sum(&mut uplinks.iter().map(|it| it.taken.egress));
        let more = sum(&mut wanted.iter().map(|it| it.min.egress));
        let score = ((taken + more) * u128::from(SCORE_MAX)).checked_div(speed).unwrap_or(0);
        score.min(u128::from(SCORE_MAX)) as u64
    }

    fn uplinks(&self, name: &str) -> Result<&[Uplink], Unfit> {
        let node = self.nodes.get(name).filter(|node| node.is_there);
        // It may have just come: so not for ever.
        node.ok_or_else(|| Unfit::now("the node is not known yet"))?.uplinks()
    }

    /// Reserves for a pod whose bind to `name` goes to the API next. [`answered`](Self::answered)
    /// has to follow.
    pub(crate) fn reserve(
        &mut self,
        uid: &str,
        wanted: &[Interface],
        name: &str,
    ) -> Result<Reserved, String> {
        self.ready()?;
        if let Some(node) = self.places.get(uid) {
            if node != name {
                return Err(format!("a bind of the pod to {node} is under way"));
            }
            let entry = self.nodes.get_mut(name).and_then(|node| node.pods.get_mut(uid));
            return match entry {
                Some(entry) if entry.state == State::Assumed => {
                    self.attempts += 1;
                    (entry.state, entry.attempt) = (State::UnderWay, self.attempts);
                    let placed = entry.placed.clone();
                    Ok(Reserved { placed, attempt: self.attempts, first: false })
                }
                Some(Entry { state: State::UnderWay, .. }) => {
                    Err("a bind of the pod is under way".into())
                }
                _ => Err(format!("the pod is bound to {name}")),
            };
        }
        let uplinks = self.uplinks(name).map_err(|unfit| unfit.reason)?;
        let places = place(uplinks, wanted, STEPS).map_err(|refused| refused.to_string())?;
        let placed: Vec<Placed> = places
            .iter()
            .zip(wanted)
            .map(|(at, it)| Placed { uplink: uplinks[*at].name.clone(), min: it.min, max: it.max })
            .collect();
        self.attempts += 1;
        let attempt = self.attempts;
        self.put(uid, name, Entry { placed: placed.clone(), state: State::UnderWay, attempt });
        Ok(Reserved { placed, attempt, first: true })
    }

    /// Says how the API answered the bind of a reservation. Whether the pod is assumed from now on:
    /// then [`forget`](Self::forget) has to follow if it is never bound.
    pub(crate) fn answered(&mut self, uid: &str, reserved: &Reserved, outcome: Outcome) -> bool {
        let of_it = |entry: &&mut Entry| {
            entry.state == State::UnderWay && entry.attempt == reserved.attempt
        };
        let Some(entry) = self.entry(uid).filter(of_it) else { return false };
        // Of an earlier request the answer may be missing: it may still bind the pod.
        if outcome == Outcome::Refused && reserved.first {
            self.remove(uid);
            return false;
        }
        entry.state = State::Assumed;
        true
    }

    /// Whether the pod is assumed since this bind.
    pub(crate) fn is_assumed(&mut self, uid: &str, attempt: u64) -> bool {
        let of_it = |entry: &mut Entry| entry.state == State::Assumed && entry.attempt == attempt;
        self.entry(uid).is_some_and(of_it)
    }

    /// Forgets a pod that is assumed since this bind: it is not bound, and no request that was sent
    /// before can bind it any more.
    pub(crate) fn forget(&mut self, uid: &str, attempt: u64) {
        if self.is_assumed(uid, attempt) {
            self.remove(uid);
        }
    }

    fn entry(&mut self, uid: &str) -> Option<&mut Entry> {
        let node = self.nodes.get_mut(self.places.get(uid)?)?;
        node.pods.get_mut(uid)
    }

    fn put(&mut self, uid: &str, name: &str, entry: Entry) {
        self.remove(uid);
        let node = self.nodes.entry(name.to_owned()).or_default();
        node.pods.insert(uid.to_owned(), entry);
        node.settle();
        self.places.insert(uid.to_owned(), name.to_owned());
    }

    fn remove(&mut self, uid: &str) {
        let Some(name) = self.places.remove(uid) else { return };
        let Some(node) = self.nodes.get_mut(&name) else { return };
        node.pods.remove(uid);
        node.settle();
        self.drop_if_empty(&name);
    }

    fn drop_if_empty(&mut self, name: &str) {
        if self.nodes.get(name).is_some_and(|node| !node.is_there && node.pods.is_empty()) {
            self.nodes.remove(name);
        }
    }
}

/// The events of the watches.
impl Ledger {
    /// A list of all nodes begins.
    pub(crate) fn nodes_begin(&mut self) {
        self.listing.nodes.clear();
    }

    /// A node is in the list.
    pub(crate) fn node_listed(&mut self, name: &str) {
        self.listing.nodes.insert(name.to_owned());
    }

    /// A node is there, with the uplinks of its annotation.
    pub(crate) fn node(&mut self, name: &str, uplinks: Option<Result<Vec<Uplink>, Malformed>>) {
        let node = self.nodes.entry(name.to_owned()).or_default();
        (node.is_there, node.uplinks) = (true, uplinks);
        node.settle();
    }

    /// A node is gone. Its pods' reservations stay until they are gone, too.
    pub(crate) fn node_gone(&mut self, name: &str) {
        if let Some(node) = self.nodes.get_mut(name) {
            (node.is_there, node.uplinks) = (false, None);
            self.drop_if_empty(name);
        }
    }

    /// The list of all nodes is complete: all others are gone.
    pub(crate) fn nodes_end(&mut self) {
        let listed = std::mem::take(&mut self.listing.nodes);
        let gone: Vec<String> =
            self.nodes.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        for name in gone {
            self.node_gone(&name);
        }
        self.nodes_listed = true;
    }

    /// A list of all bound pods begins.
    pub(crate) fn pods_begin(&mut self) {
        self.listing.pods.clear();
    }

    /// A bound pod is in the list.
    pub(crate) fn pod_listed(&mut self, uid: &str) {
        self.listing.pods.insert(uid.to_owned());
    }

    /// A pod is bound to a node, with the places of its annotation; `None` if it came by another
    /// way and has none. The places that it has an entry for stay, as do those that the watch first
    /// showed: a change of the annotation makes no room.
    pub(crate) fn pod(&mut self, uid: &str, name: &str, placed: Option<Vec<Placed>>) {
        let is_here = self.places.get(uid).is_some_and(|node| node == name);
        if let Some(entry) = self.entry(uid).filter(|entry| is_here || entry.state == State::Bound)
        {
            entry.state = State::Bound;
            return;
        }
        match placed {
            None => self.remove(uid),
            Some(placed) => {
                self.put(uid, name, Entry { placed, state: State::Bound, attempt: 0 });
            }
        }
    }

    /// A bound pod is gone, or has ended.
    pub(crate) fn pod_gone(&mut self, uid: &str) {
        self.remove(uid);
    }

    /// The list of all bound pods is complete: all others that the watch has shown are gone. Those
    /// whose bind is under way or assumed may have been bound after it.
    pub(crate) fn pods_end(&mut self) {
        let listed = std::mem::take(&mut self.listing.pods);
        let bound = self.nodes.values().flat_map(|node| &node.pods);
        let bound = bound.filter(|(_, entry)| entry.state == State::Bound).map(|(uid, _)| uid);
        let gone: Vec<String> = bound.filter(|uid| !listed.contains(*uid)).cloned().collect();
        for uid in gone {
            self.remove(&uid);
        }
        self.pods_listed = true;
    }

    /// The uplinks of a node, each with all that is placed there.
    pub(crate) fn of_node(&self, name: &str) -> Vec<(Uplink, Vec<Placed>)> {
        let Some(node) = self.nodes.get(name) else { return Vec::new() };
        let placed = |uplink: &Uplink| {
            let all = node.pods.values().flat_map(|entry| &entry.placed);
            all.filter(|placed| placed.uplink == uplink.name).cloned().collect()
        };
        let uplinks = node.uplinks().unwrap_or_default();
        uplinks.iter().map(|uplink| (uplink.clone(), placed(uplink))).collect()
    }
}

fn emptied(mut uplink: Uplink) -> Uplink {
    uplink.taken = Rates::default();
    uplink
}

#[cfg(test)]
mod tests;
