//! What kube-scheduler sends to an extender and expects from it: k8s.io/kube-scheduler/extender/v1,
//! whose fields have no JSON names, so that Go writes them as they are called. Schedulers before
//! 1.17 wrote them in lower case. Go reads either.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// `ExtenderArgs`: of the pod the fields that are read here, of nodes their text as it came.
#[derive(Deserialize)]
pub(crate) struct Arguments<'a> {
    #[serde(rename = "Pod", alias = "pod")]
    pub(crate) pod: PodText,
    /// With `nodeCacheCapable: false`.
    #[serde(borrow, default, rename = "Nodes", alias = "nodes")]
    nodes: Option<NodeList<'a>>,
    /// With `nodeCacheCapable: true`.
    #[serde(default, rename = "NodeNames", alias = "nodenames", alias = "nodeNames")]
    names: Option<Vec<String>>,
}

#[derive(Deserialize)]
pub(crate) struct PodText {
    pub(crate) metadata: PodMeta,
}

#[derive(Deserialize)]
pub(crate) struct PodMeta {
    #[serde(default)]
    pub(crate) uid: String,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

impl PodMeta {
    pub(crate) fn annotation(&self, key: &str) -> Option<&str> {
        Some(self.annotations.as_ref()?.get(key)?)
    }
}

/// `NodeList`.
#[derive(Serialize, Deserialize)]
struct NodeList<'a> {
    /// Go writes an empty list as `null`.
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
struct NodeText<'a> {
    #[serde(borrow)]
    metadata: NodeMeta<'a>,
}

#[derive(Deserialize)]
struct NodeMeta<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
}

/// Nodes in the form in which they came.
pub(crate) enum Candidates<'a> {
    Texts(Vec<(Cow<'a, str>, &'a RawValue)>),
    Names(Vec<String>),
}

impl<'a> Arguments<'a> {
    /// The pod, and the nodes that it may go to.
    pub(crate) fn parsed(text: &'a [u8]) -> Result<(PodMeta, Candidates<'a>), String> {
        let wrong = |error: serde_json::Error| format!("not understood: {error}");
        let it: Self = serde_json::from_slice(text).map_err(wrong)?;
        let candidates = match (it.nodes, it.names) {
            (_, Some(names)) => Candidates::Names(names),
            (Some(list), None) => {
                let named = list.items.unwrap_or_default().into_iter().map(|text| {
                    let node: NodeText<'a> = serde_json::from_str(text.get())?;
                    Ok((node.metadata.name, text))
                });
                Candidates::Texts(named.collect::<Result<_, _>>().map_err(wrong)?)
            }
            (None, None) => return Err("there are neither Nodes nor NodeNames".into()),
        };
        Ok((it.pod.metadata, candidates))
    }
}

impl<'a> Candidates<'a> {
    pub(crate) fn names(&self) -> Vec<&str> {
        match self {
            Self::Texts(nodes) => nodes.iter().map(|(name, _)| &**name).collect(),
            Self::Names(names) => names.iter().map(String::as_str).collect(),
        }
    }

    /// The answer with the nodes that fit, in the same form.
    pub(crate) fn filtered(self, fits: &[bool]) -> Filtered<'a> {
        let mut fits = fits.iter();
        let mut keep = || fits.next() == Some(&true);
        let mut filtered = Filtered::default();
        match self {
            Self::Texts(nodes) => {
                let kept = nodes.into_iter().filter(|_| keep()).map(|(_, text)| text).collect();
                filtered.nodes = Some(NodeList { items: Some(kept) });
            }
            Self::Names(names) => {
                filtered.names = Some(names.into_iter().filter(|_| keep()).collect());
            }
        }
        filtered
    }
}

/// `ExtenderFilterResult`.
#[derive(Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Filtered<'a> {
    nodes: Option<NodeList<'a>>,
    #[serde(rename = "NodeNames")]
    names: Option<Vec<String>>,
    /// By node, all that do not fit.
    pub(crate) failed_nodes: BTreeMap<String, String>,
    /// Of these those that would not fit without other pods either: no pod is evicted for them.
    pub(crate) failed_and_unresolvable_nodes: BTreeMap<String, String>,
    error: String,
}

impl Filtered<'_> {
    pub(crate) fn failed(error: String) -> Self {
        Self { error, ..Self::default() }
    }
}

/// `HostPriority`.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Priority {
    pub(crate) host: String,
    pub(crate) score: u64,
}

/// `ExtenderBindingArgs`.
#[derive(Deserialize)]
pub(crate) struct Binding {
    #[serde(rename = "PodName", alias = "podName")]
    pub(crate) name: String,
    #[serde(rename = "PodNamespace", alias = "podNamespace")]
    pub(crate) namespace: String,
    #[serde(rename = "PodUID", alias = "podUID")]
    pub(crate) uid: String,
    #[serde(rename = "Node", alias = "node")]
    pub(crate) node: String,
}

/// `ExtenderBindingResult`.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Bound {
    pub(crate) error: String,
}
