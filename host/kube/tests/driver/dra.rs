//! The driver of dynamic resource allocation.

use std::collections::BTreeMap;
use std::time::Duration;

use rocinante_kube::{DRIVER, MBPS, Places, UPLINKS};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::task::JoinSet;

use crate::agent::{Agent, socket};
use crate::api::Api;
use crate::folder::names;
use crate::plugins::Manager;
use crate::{DEVICES, NEVER, Node, PERIOD, until};

pub(crate) const UID: &str = "0f1e2d3c-4b5a";
const SLICE: &str = "n1-rocinante.dev";

/// A node whose uplinks the scheduler shares out.
pub(crate) struct Shared {
    pub(crate) node: Node,
    pub(crate) manager: Manager,
}

impl Shared {
    pub(crate) async fn new() -> Self {
        Self::with_latency(Duration::ZERO).await
    }

    pub(crate) async fn with_latency(latency: Duration) -> Self {
        let node = Node::with_latency(latency).await;
        node.api.change_node("n1", |node| node["metadata"]["uid"] = "node-uid".into());
        let manager = Manager::new(&node.folder.at("kubelet"));
        Self { node, manager }
    }

    /// With an agent of one uplink of 10 Gbit/s, a driver and a kubelet that knows it.
    pub(crate) async fn running() -> (Self, Agent, JoinSet<()>) {
        Self::running_with(PERIOD).await
    }

    pub(crate) async fn running_with(period: Duration) -> (Self, Agent, JoinSet<()>) {
        let this = Self::new().await;
        let (agent, driver) = (this.node.agent(&[10]), this.driver_with("a", period));
        this.manager.start();
        this.registered(1).await;
        until("the slice", async || this.generation() == Some(1)).await;
        (this, agent, driver)
    }

    pub(crate) fn api(&self) -> &Api {
        &self.node.api
    }

    /// The status of a claim's only device.
    pub(crate) fn device(&self, claim: &str) -> Value {
        self.api().claim(claim).unwrap()["status"]["devices"][0].clone()
    }

    /// The claim `c` is prepared for the pod `p`, which has its network.
    pub(crate) async fn has_network(&self, agent: &Agent) {
        self.api().has_claim("c", UID, &["p"]);
        self.manager.prepare("p", (UID, "c")).await.unwrap();
        agent.has_pod("p", "02:00:00:00:00:01", "fd00::7");
        until("its network", async || self.device("c")["networkData"].is_object()).await;
    }

    /// A driver in this process, of a pod with this UID. It ends with the value.
    pub(crate) fn driver(&self, uid: &str) -> JoinSet<()> {
        self.driver_with(uid, PERIOD)
    }

    /// One that looks this often without an event.
    pub(crate) fn driver_with(&self, uid: &str, period: Duration) -> JoinSet<()> {
        let places = Places {
            node: "n1".into(),
            agent: socket(&self.node.folder),
            kubelet: self.node.folder.at("kubelet"),
            cdi: self.node.folder.at("cdi"),
            dra: Some(uid.into()),
        };
        let mut task = JoinSet::new();
        task.spawn(rocinante_kube::driver(self.api().client(), places, DEVICES, period));
        task
    }

    pub(crate) async fn registered(&self, drivers: usize) {
        until("it registers", async || self.manager.plugins().len() == drivers).await;
    }

    pub(crate) fn slice(&self) -> Option<Value> {
        let slices = self.api().slices();
        assert!(slices.len() <= 1, "{slices:?}");
        slices.into_iter().next()
    }

    pub(crate) fn generation(&self) -> Option<i64> {
        self.slice()?["spec"]["pool"]["generation"].as_i64()
    }

    pub(crate) fn devices(&self) -> Vec<Value> {
        self.slice().map_or(Vec::new(), |it| it["spec"]["devices"].as_array().unwrap().clone())
    }

    /// The files of CDI of claims, and the claims of the state.
    pub(crate) fn left(&self) -> (Vec<String>, Vec<String>) {
        let text = std::fs::read(self.state()).unwrap_or_default();
        let state: Value = serde_json::from_slice(&text).unwrap_or_default();
        let claims = state["claims"].as_object().into_iter().flat_map(|it| it.keys().cloned());
        let files = names(&self.node.folder.at("cdi")).into_iter();
        (files.filter(|it| it.contains("claim_")).collect(), claims.collect())
    }

    pub(crate) fn state(&self) -> std::path::PathBuf {
        self.node.folder.at("kubelet/plugins/rocinante.dev/state.json")
    }

    /// Nothing of a claim is there, but for what the agent has.
    pub(crate) fn has_nothing(&self) -> bool {
        self.left() == (Vec::new(), Vec::new())
    }

    fn cdi(&self, uid: &str) -> Value {
        let path = self.node.folder.at("cdi").join(format!("rocinante.dev-claim_{uid}.json"));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }
}

/// A share of the uplink, as the scheduler allocates it.
pub(crate) fn share(id: &str, egress: &str) -> Value {
    json!({
        "request": "rdma", "driver": DRIVER, "pool": "n1", "device": "ens1", "shareID": id,
        "consumedCapacity": {"egress": egress, "ingress": "1M"},
    })
}

fn devices(results: &[Value]) -> Value {
    json!({"results": results})
}

pub(crate) fn with(results: &[Value], parameters: &Value) -> Value {
    let opaque = json!({"driver": DRIVER, "parameters": parameters});
    json!({"results": results, "config": [{"source": "FromClaim", "opaque": opaque}]})
}

impl Api {
    /// A claim of 3G for a pod.
    pub(crate) fn has_claim(&self, name: &str, uid: &str, pods: &[&str]) {
        self.put_claim(name, uid, pods, &devices(&[share("s-1", "3G")]));
    }
}

#[tokio::test]
async fn uplinks_are_devices_that_are_shared() {
    let (it, agent, _driver) = Shared::running().await;
    let slice = it.slice().unwrap();
    assert_eq!(slice["metadata"]["name"], SLICE);
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    assert_eq!(slice["spec"]["pool"]["name"], "n1");
    let capacity = json!({
        "value": "10G",
        "requestPolicy": {
            "default": "100M", "validRange": {"min": "1M", "max": "10G", "step": "1M"},
        },
    });
    let devices = it.devices();
    assert_eq!((&devices[0]["name"], devices.len()), (&json!("ens1"), 1));
    assert_eq!(devices[0]["allowMultipleAllocations"], true);
    assert_eq!(devices[0]["capacity"], json!({"egress": capacity, "ingress": capacity}));
    assert_eq!(devices[0]["attributes"]["speed"], json!({"int": 10_000_000_000_i64}));
    // Another uplink is a new generation; one that is down has a taint, and nothing else changes.
    agent.has(&[("ens1", 10, None), ("Up.2", 25, Some("no such interface"))]);
    until("the second", async || it.devices().len() == 2).await;
    assert_eq!((it.generation(), &it.devices()[1]["name"]), (Some(2), &json!("x-55702e32")));
    let taint = it.devices()[1]["taints"][0].clone();
    assert_eq!(
        (&taint["key"], &taint["effect"]),
        (&json!("rocinante.dev/down"), &json!("NoSchedule"))
    );
    agent.has(&[("ens1", 10, None), ("Up.2", 25, None)]);
    until("it is up", async || it.devices()[1]["taints"].is_null()).await;
    // Less than is allocated.
    it.api().has_claim("c", UID, &["p"]);
    it.manager.prepare("p", (UID, "c")).await.unwrap();
    agent.has(&[("ens1", 2, None)]);
    until("a taint", async || it.devices()[0]["taints"][0]["key"] == "rocinante.dev/short").await;
    assert_eq!(it.devices()[0]["capacity"]["egress"]["value"], "2G");
    assert_eq!(agent.claims().len(), 1, "its pod runs on");
    it.manager.unprepare("p", "c").await.unwrap();
    until("no taint", async || it.devices()[0]["taints"].is_null()).await;
    // Without an agent it stays. A kubelet that starts removes it.
    drop(agent);
    let before = it.generation();
    tokio::time::sleep(PERIOD * 5).await;
    assert_eq!(it.generation(), before);
    it.api().wipe_slices();
    until("again", async || it.generation() > before).await;
    // There is one authority for an uplink.
    assert_eq!(it.node.mbps(), None);
    it.api().change_node("n1", |node| node["metadata"]["annotations"][UPLINKS] = "[]".into());
    until("no device", async || it.devices().is_empty()).await;
}

#[tokio::test]
async fn fields_that_the_server_drops_are_missed() {
    let it = Shared::new().await;
    it.api().drops(&["allowMultipleAllocations"]);
    let (_agent, _driver) = (it.node.agent(&[10]), it.driver_with("a", NEVER));
    it.manager.start();
    // Whole uplinks would be given away: there are no devices, and the node has Mb/s.
    until("the Mb/s", async || it.node.mbps().as_deref() == Some("10k")).await;
    until("no devices", async || it.slice().is_some() && it.devices().is_empty()).await;
    let events = it.api().events();
    assert_eq!((events.len(), &events[0]["reason"]), (1, &json!("NoSharedDevices")));
    let generation = it.generation();
    tokio::time::sleep(PERIOD * 10).await;
    assert_eq!((it.generation(), it.api().events().len()), (generation, 1));

    // One that drops taints has no device that is down.
    let it = Shared::new().await;
    it.api().drops(&["taints"]);
    let (agent, _driver) = (it.node.agent(&[]), it.driver("a"));
    agent.has(&[("ens1", 10, None), ("ens2", 10, Some("down"))]);
    until("one", async || it.devices().len() == 1).await;
    assert_eq!(it.api().events()[0]["reason"], "NoDeviceTaints");
    assert_eq!(it.node.api.node("n1").unwrap()["status"]["capacity"][MBPS], Value::Null);
}

#[tokio::test]
async fn it_registers_when_the_folder_comes_late_and_again_after_it_is_wiped() {
    let it = Shared::new().await;
    let (_agent, _driver) = (it.node.agent(&[10]), it.driver("a"));
    tokio::time::sleep(PERIOD * 3).await;
    it.manager.start();
    it.registered(1).await;
    for kubelets in 2..4 {
        it.manager.start();
        it.registered(1).await;
        assert!(it.manager.registrations().0 >= kubelets);
    }
    // The folder of all sockets, and the socket that is called.
    std::fs::remove_dir_all(&it.manager.registry).unwrap();
    until("it is gone", async || it.manager.plugins().is_empty()).await;
    std::fs::create_dir(&it.manager.registry).unwrap();
    it.registered(1).await;
    std::fs::remove_file(it.node.folder.at("kubelet/plugins/rocinante.dev/dra-a.sock")).unwrap();
    it.api().has_claim("c", UID, &["p"]);
    until("it is called", async || it.manager.prepare("p", (UID, "c")).await.is_ok()).await;
}

#[tokio::test]
async fn versions_that_meet_and_that_do_not() {
    for (version, meets) in [("v1", true), ("v1beta1", true), ("v2", false)] {
        let mut it = Shared::new().await;
        let (_agent, _driver) = (it.node.agent(&[10]), it.driver("a"));
        it.manager.speaks(version);
        it.manager.start();
        until("it is asked", async || it.manager.registrations() != (0, 0)).await;
        if meets {
            it.api().has_claim("c", UID, &["p"]);
            it.manager.prepare("p", (UID, "c")).await.unwrap();
        } else {
            until("again", async || it.manager.registrations().1 > 3).await;
        }
        assert_eq!(it.manager.plugins().len(), usize::from(meets), "{version}");
    }
}

#[tokio::test]
async fn a_claim_is_prepared_as_often_as_it_is_asked_for() {
    let (it, agent, _driver) = Shared::running().await;
    let parameters = json!({"backend": "packet", "limit": "5G", "class": "gold"});
    it.api().put_claim("c", UID, &["p"], &with(&[share("s-1", "3G")], &parameters));
    let wanted = vec![format!("rocinante.dev/claim={UID}.ens1.s-1")];
    for time in 0..3 {
        // A kubelet that starts asks again, also while the API server is away.
        it.manager.start();
        it.registered(1).await;
        it.api().away(time == 2);
        assert_eq!(it.manager.prepare("p", (UID, "c")).await.unwrap(), wanted, "{time}");
    }
    it.api().away(false);
    let share = json!([{"uplink": "ens1", "rate": 3_000_000_000_u64, "ceil": 5_000_000_000_u64}]);
    let claim = json!({
        "uid": UID, "pods": ["p"], "shares": share, "class": "gold", "backend": "packet",
    });
    assert_eq!(agent.claims(), BTreeMap::from([(UID.to_owned(), claim)]));
    let cdi = it.cdi(UID);
    assert_eq!(
        (&cdi["kind"], &cdi["devices"][0]["name"]),
        (&json!("rocinante.dev/claim"), &json!(format!("{UID}.ens1.s-1")))
    );
    let edits = &cdi["devices"][0]["containerEdits"];
    let agents = "ROCINANTE_AGENT=/run/rocinante/agent.sock";
    assert_eq!(edits["env"], json!([agents, "ROCINANTE_NETDEV=packet"]));
    let known: Value = serde_json::from_str(include_str!("../../../agent/dist/cdi.json")).unwrap();
    assert_eq!(edits["mounts"], known["devices"][0]["containerEdits"]["mounts"]);
    // Its claim and its pod are gone; and it is asked once more.
    it.api().delete_claim("c");
    for _ in 0..3 {
        it.manager.call_unprepare(&[(UID, "c")]).await.unwrap();
    }
    assert!(it.has_nothing() && agent.claims().is_empty());
}

#[tokio::test]
async fn a_claim_that_is_not_known_is_unprepared() {
    let (it, agent, _driver) = Shared::running().await;
    let long = "x".repeat(100_000);
    for uid in [UID, "", "../../state", "a/b", ".", &long] {
        it.manager.call_unprepare(&[(uid, "c")]).await.unwrap();
    }
    drop(agent);
    it.manager.call_unprepare(&[(UID, "c")]).await.unwrap();
    assert!(it.has_nothing());
}

#[tokio::test]
async fn a_claim_made_anew_is_another_one() {
    let (it, agent, driver) = Shared::running().await;
    it.api().has_claim("c", "old", &["p"]);
    it.manager.call_prepare(&[("old", "c")]).await.unwrap()["old"].as_ref().unwrap();
    it.api().has_claim("c", "new", &["q"]);
    // The kubelet still speaks of another one.
    let answer = it.manager.call_prepare(&[("older", "c")]).await.unwrap();
    let why = answer["older"].as_ref().unwrap_err();
    assert!(why.contains("made anew") && why.contains("new"), "{why}");
    it.manager.call_prepare(&[("new", "c")]).await.unwrap()["new"].as_ref().unwrap();
    assert_eq!(agent.claims().keys().collect::<Vec<_>>(), ["new", "old"]);
    it.manager.call_unprepare(&[("old", "c")]).await.unwrap();
    assert_eq!(agent.claims().keys().collect::<Vec<_>>(), ["new"]);
    assert_eq!(it.left().1, ["new"]);
    // Allocated anew, it has its UID still.
    it.api().put_claim("c", "new", &["q"], &devices(&[share("s-2", "4G")]));
    let answer = it.manager.call_prepare(&[("new", "c")]).await.unwrap();
    let device = &answer["new"].as_ref().unwrap()[0];
    assert_eq!(device.cdi_ids, ["rocinante.dev/claim=new.ens1.s-2"]);
    assert_eq!(agent.claims()["new"]["shares"][0]["rate"], 4_000_000_000_u64);
    // Or while no driver is there.
    drop(driver);
    it.api().put_claim("c", "new", &["q"], &devices(&[share("s-3", "5G")]));
    let _driver = it.driver("b");
    until("it is mended", async || {
        agent.claims()["new"]["shares"][0]["rate"] == 5_000_000_000_u64
            && it.cdi("new")["devices"][0]["name"] == "new.ens1.s-3"
    })
    .await;
}

#[tokio::test]
async fn each_claim_is_answered_apart_and_by_its_own_results() {
    let (it, agent, _driver) = Shared::running().await;
    let mut other = share("s-0", "9G");
    other["driver"] = "gpu.example.com".into();
    // Two shares of one device, and a device of another driver.
    let two = [other.clone(), share("s-1", "1G"), share("s-2", "2G")];
    it.api().put_claim("two", "u-two", &["p"], &devices(&two));
    it.api().put_claim("others", "u-others", &["p"], &devices(&[other]));
    it.api().put_claim("wrong", "u-wrong", &["p"], &with(&[share("s", "1G")], &json!({"x": "y"})));
    it.api().put_garbage("garbage", json!({"metadata": {"uid": "u-garbage"}, "status": 7}));
    let claims = [
        ("u-two", "two"),
        ("u-others", "others"),
        ("u-wrong", "wrong"),
        ("u-garbage", "garbage"),
        ("u-none", "none"),
        ("../u", "two"),
        ("u-two", ""),
    ];
    let mut answer = it.manager.call_prepare(&claims[..6]).await.unwrap();
    assert_eq!(answer.len(), 6);
    let devices = answer.remove("u-two").unwrap().unwrap();
    let shares: Vec<_> = devices.iter().map(|it| it.share_id.as_deref().unwrap()).collect();
    assert_eq!(shares, ["s-1", "s-2"]);
    assert!(devices.iter().all(|it| (&*it.pool, &*it.device) == ("n1", "ens1")));
    assert!(devices.iter().all(|it| it.requests == ["rdma"] && it.cdi_ids.len() == 1));
    for (uid, says) in [
        ("u-others", "no device of rocinante.dev"),
        ("u-wrong", "\"x\" is no parameter"),
        ("u-garbage", "the claim"),
        ("u-none", "it is gone"),
        ("../u", "no claim's UID"),
    ] {
        let why = answer.remove(uid).unwrap().unwrap_err();
        assert!(why.contains(says), "{uid}: {why}");
    }
    let rates = &agent.claims()["u-two"]["shares"];
    assert_eq!(
        (&rates[0]["rate"], &rates[1]["rate"]),
        (&json!(1_000_000_000), &json!(2_000_000_000))
    );
    assert_eq!(it.left().1, ["u-two"]);
    assert!(it.manager.call_prepare(&[]).await.unwrap().is_empty());
}

#[tokio::test]
async fn hostile_quantities_have_a_clear_answer() {
    let (it, agent, _driver) = Shared::running().await;
    for (nth, (text, says)) in [
        ("-3G", "negative"),
        ("1E", "not between 1M and 1T"),
        ("0", "not between"),
        ("3000m", "not between"),
        ("1500m", "no whole number"),
        ("3G\n", "no quantity"),
        ("99999999999999999999999999", "too much"),
    ]
    .into_iter()
    .enumerate()
    {
        let uid = format!("u-{nth}");
        it.api().put_claim("c", &uid, &["p"], &devices(&[share("s", text)]));
        let answer = it.manager.call_prepare(&[(&uid, "c")]).await.unwrap();
        let why = answer[&uid].as_ref().unwrap_err();
        assert!(why.contains(says) && why.contains("egress of ens1"), "{text}: {why}");
    }
    let mut none = share("s", "3G");
    none.as_object_mut().unwrap().remove("consumedCapacity");
    it.api().put_claim("c", "u", &["p"], &devices(&[none]));
    let answer = it.manager.call_prepare(&[("u", "c")]).await.unwrap();
    assert!(answer["u"].as_ref().unwrap_err().contains("DRAConsumableCapacity"));
    assert!(agent.claims().is_empty() && it.has_nothing());
    // As the scheduler may write what it rounded up.
    for (text, rate) in
        [("3Gi", 3_221_225_472_u64), ("3e9", 3_000_000_000), ("1000000Ki", 1_024_000_000)]
    {
        it.api().put_claim("c", text, &["p"], &devices(&[share("s", text)]));
        it.manager.call_prepare(&[(text, "c")]).await.unwrap()[text].as_ref().unwrap();
        assert_eq!(agent.claims()[text]["shares"][0]["rate"], rate);
    }
}

#[tokio::test]
async fn without_an_agent_no_pod_begins() {
    let (it, agent, _driver) = Shared::running().await;
    it.api().has_claim("c", UID, &["p"]);
    let prepared =
        async || it.manager.call_prepare(&[(UID, "c")]).await.unwrap().remove(UID).unwrap();
    agent.refuses(Some("ens1 has 10gbit, and with this claim 11gbit are reserved"));
    assert!(prepared().await.unwrap_err().contains("11gbit are reserved"));
    assert!(it.has_nothing());
    agent.refuses(None);
    agent.hangs(true);
    assert!(prepared().await.unwrap_err().contains("no agent"));
    agent.hangs(false);
    agent.is_old();
    assert!(prepared().await.unwrap_err().contains("unknown variant `claim`"));
    drop(agent);
    assert!(prepared().await.unwrap_err().contains("no agent"));
    assert!(it.has_nothing());
    // One that is prepared stays when the agent is away, and one that comes learns of it.
    let agent = it.node.agent(&[10]);
    prepared().await.unwrap();
    drop(agent);
    assert!(prepared().await.is_err());
    assert_eq!(it.left().1, [UID]);
    let agent = it.node.agent(&[10]);
    until("it learns", async || agent.claims().contains_key(UID)).await;
    // Unprepared while it is away, and its state has it.
    let claims = agent.claims();
    drop(agent);
    it.manager.call_unprepare(&[(UID, "c")]).await.unwrap();
    let agent = it.node.agent(&[10]);
    agent.has_claims(claims);
    until("it forgets", async || agent.claims().is_empty()).await;
}

#[tokio::test]
async fn pods_that_share_a_claim_are_known() {
    let (it, agent, _driver) = Shared::running().await;
    it.api().has_claim("c", UID, &["p"]);
    let first = it.manager.prepare("p", (UID, "c")).await.unwrap();
    // The second is no call of the kubelet's.
    it.api().has_claim("c", UID, &["p", "q"]);
    it.api().put_pod("q", "c");
    assert_eq!(it.manager.prepare("q", (UID, "c")).await.unwrap(), first);
    until("the second", async || agent.claims()[UID]["pods"] == json!(["p", "q"])).await;
    // One whose claim of that name is another one, and one that the claim is not reserved for.
    for (namespace, pod, reserved) in
        [("elsewhere", "other", &["p", "q", "other"][..]), ("default", "thief", &["p", "q"])]
    {
        it.api().has_claim("c", UID, reserved);
        it.api().put_pod_in(namespace, pod, "c");
        tokio::time::sleep(PERIOD * 10).await;
        assert_eq!(agent.claims()[UID]["pods"], json!(["p", "q"]), "{pod}");
    }
    // Another comes, and one has gone, while the agent refuses.
    agent.refuses(Some("not now"));
    it.api().has_claim("c", UID, &["p", "r"]);
    it.api().put_pod("r", "c");
    until("it is refused", async || agent.refused() > 0).await;
    agent.refuses(None);
    until("the third", async || agent.claims()[UID]["pods"] == json!(["p", "r"])).await;
    // A kubelet that asks again has those of now.
    it.api().has_claim("c", UID, &["p", "s"]);
    it.manager.call_prepare(&[(UID, "c")]).await.unwrap()[UID].as_ref().unwrap();
    assert_eq!(agent.claims()[UID]["pods"], json!(["p", "s"]));
    it.manager.unprepare("p", "c").await.unwrap();
    assert_eq!(agent.claims().len(), 1);
    it.manager.unprepare("q", "c").await.unwrap();
    assert!(agent.claims().is_empty() && it.has_nothing());
}

#[tokio::test]
async fn a_pod_that_has_ended_joins_no_claim() {
    let it = Shared::new().await;
    it.api().has_claim("c", UID, &["p"]);
    it.api().put_pod("ended", "c");
    it.api().set_phase("ended", "Succeeded");
    let (_agent, _driver) = (it.node.agent(&[10]), it.driver("a"));
    it.manager.start();
    it.registered(1).await;
    until("the slice", async || it.generation() == Some(1)).await;
    it.manager.prepare("p", (UID, "c")).await.unwrap();
    let reads = || {
        let requests = it.api().requests().into_iter();
        requests.filter(|it| it.starts_with("GET") && it.contains("resourceclaims/c")).count()
    };
    // It is prepared, and its status looked at.
    until("its status", async || it.api().claim("c").unwrap()["status"]["devices"].is_array())
        .await;
    assert_eq!(reads(), 2);
    tokio::time::sleep(PERIOD * 30).await;
    assert_eq!(reads(), 2);
}

#[tokio::test]
async fn a_kubelet_may_connect_long_before_it_calls() {
    let (it, _agent, _driver) = Shared::running().await;
    let path = it.node.folder.at("kubelet/plugins/rocinante.dev/dra-a.sock");
    let mut stream = tokio::net::UnixStream::connect(path).await.unwrap();
    let mut sent = Vec::new();
    let ended = stream.read_to_end(&mut sent);
    let waited = tokio::time::timeout(Duration::from_secs(12), ended).await;
    assert!(waited.is_err(), "the connection ended: {waited:?}");
}

#[tokio::test]
async fn the_status_of_a_claim_says_what_it_got() {
    let (it, agent, _driver) = Shared::running().await;
    let results = [share("s-1", "3G"), share("s-2", "1G")];
    it.api().put_claim("c", UID, &["p"], &with(&results, &json!({"backend": "auto"})));
    it.manager.prepare("p", (UID, "c")).await.unwrap();
    let status = || it.api().claim("c").unwrap()["status"]["devices"].clone();
    until("it is ready", async || status()[1]["conditions"][0]["status"] == "True").await;
    assert_eq!((&status()[1]["shareID"], &status()[0]["device"]), (&json!("s-2"), &json!("ens1")));
    let message = status()[0]["conditions"][0]["message"].clone();
    assert!(message.as_str().unwrap().contains("may be udp"), "{message}");
    assert!(status()[0]["networkData"].is_null());
    agent.has_pod("p", "02:00:00:00:00:01", "fd00::7");
    let network = json!({"hardwareAddress": "02:00:00:00:00:01", "ips": ["fd00::7/128"]});
    until("the network", async || status()[0]["networkData"] == network).await;
    assert_eq!(status().as_array().unwrap().len(), 2);
    // Nothing is written twice, and little is asked.
    let of_claim = |it: &&String| it.contains("resourceclaims");
    let asked = it.api().requests().iter().filter(of_claim).count();
    tokio::time::sleep(PERIOD * 10).await;
    assert_eq!(it.api().requests().iter().filter(of_claim).count(), asked);
    assert!(asked <= 4, "{asked}");
}
