//! Configuration of the proxies of a mesh.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    env,
    net::SocketAddr,
    process::Command,
    rc::Rc,
};

use anyhow::{Context as _, bail};
use skysail_core::names::ADMIN_PORT;
use skysail_model::{ClientScope, ProxyView, TokenRule, compile_for, token_rules};
use skysail_proxy::explain::{EncodedResource, HeldResources, ProxyConfiguration};
use skysail_sandbox::{Offline, OfflinePod};
use skysail_xds::Kind;

use super::served::ControlPlane;

/// Page of a proxy with its resources.
const RESOURCES: &str = "config_dump?include_eds";
/// Page of a proxy with the state of its endpoints.
const CLUSTERS: &str = "clusters?format=json";

/// Proxies of a mesh.
pub(super) struct Proxies<'a> {
    /// Objects, pods and names.
    pub(super) mesh: &'a Offline,
    held: Held,
    /// Proxies that the way has reached so far.
    loaded: RefCell<Loaded>,
    notes: RefCell<Vec<String>>,
}

/// Source of the configuration that the proxies hold.
pub(super) enum Held {
    /// Pages `/config_dump` of some proxies by namespace and name of the pod. The others hold what the
    /// control plane compiles.
    Pages(HashMap<(String, String), Vec<u8>>),
    /// Name of the running mesh, whose proxies are asked.
    Running(String),
    /// Control plane, which is asked what it serves.
    Served(ControlPlane),
}

/// Proxies by namespace and name of the pod; `None` for those that the control plane would refuse.
type Loaded = HashMap<(String, String), Option<Rc<Proxy>>>;

/// A proxy and its configuration.
pub(super) struct Proxy {
    /// Configuration.
    pub(super) configuration: ProxyConfiguration,
    /// View of the proxy.
    pub(super) view: ProxyView,
    /// Scope in which its routes are compiled.
    pub(super) scope: ClientScope,
    /// Clusters and virtual hosts that the proxy does not hold, because no request has used them yet.
    pub(super) on_demand: BTreeSet<String>,
    /// Resources that the proxy does not apply: name and reason.
    pub(super) refused: Vec<(String, String)>,
}

impl<'a> Proxies<'a> {
    pub(super) fn new(mesh: &'a Offline, held: Held) -> Self {
        Self { mesh, held, loaded: RefCell::default(), notes: RefCell::default() }
    }

    /// Returns the proxy of a pod; `None` if the control plane would refuse it.
    pub(super) fn of(&self, pod: &OfflinePod) -> Option<Rc<Proxy>> {
        let key = (pod.namespace.clone(), pod.name.clone());
        let mut loaded = self.loaded.borrow_mut();
        loaded.entry(key).or_insert_with(|| self.load(pod).map(Rc::new)).clone()
    }

    /// Returns remarks about proxies that could not be asked.
    pub(super) fn notes(&self) -> Vec<String> {
        self.notes.borrow().clone()
    }

    fn load(&self, pod: &OfflinePod) -> Option<Proxy> {
        let world = &self.mesh.world;
        let node = pod.proxy(world)?;
        let (made, _) = compile_for(world, &node.view, node.hostname());
        let view = node.view;
        let mut resources = Vec::new();
        for kind in [Kind::Cluster, Kind::Endpoint, Kind::Route, Kind::Listener, Kind::Secret] {
            resources.extend(made.iter(kind).map(|resource| EncodedResource {
                kind,
                name: resource.name.to_string(),
                body: resource.body.clone(),
            }));
        }
        let (mut on_demand, mut refused) = (BTreeSet::new(), Vec::new());
        let mut is_held = false;
        if let Some(held) = self.held(pod, &resources) {
            match held {
                Ok(held) => {
                    (resources, on_demand, refused) = (held.resources, held.on_demand, held.refused);
                    is_held = true;
                }
                Err(error) => self.notes.borrow_mut().push(format!(
                    "the configuration of the proxy of {}/{} is not known ({error:#}); the explanation uses the \
                     files",
                    pod.namespace, pod.name
                )),
            }
        }
        let scope = ClientScope::of(&view, &world.grouping());
        let mut configuration = ProxyConfiguration::load(&resources);
        if let Some(ejected) = self.ejected(pod) {
            configuration.apply_ejections(&ejected);
        }
        if !is_held {
            // A running control plane fetches them. Until then its proxies refuse the tokens.
            let rules = token_rules(world, &view);
            let is_unknown = |rule: &TokenRule| !rule.has_keys && !rule.keys_from.is_empty();
            let unknown = rules.iter().enumerate().filter(|(_, rule)| is_unknown(rule));
            configuration.assume_signatures(unknown.map(|(index, _)| index).collect());
        }
        configuration.add_refused(refused);
        let refused = configuration.refused().to_vec();
        Some(Proxy { configuration, view, scope, on_demand, refused })
    }

    /// Returns the endpoints that a running proxy has ejected, by cluster; `None` if they are not known.
    fn ejected(&self, pod: &OfflinePod) -> Option<Vec<(String, SocketAddr)>> {
        let Held::Running(mesh) = &self.held else { return None };
        match ask(mesh, pod, CLUSTERS).and_then(|page| HeldResources::ejected(&page)) {
            Ok(ejected) => Some(ejected),
            Err(error) => {
                self.notes.borrow_mut().push(format!(
                    "the ejected endpoints of the proxy of {}/{} are not known ({error:#})",
                    pod.namespace, pod.name
                ));
                None
            }
        }
    }

    /// Returns what a proxy holds, or what the control plane serves to it; `None` if that is what is compiled from the
    /// files.
    fn held(&self, pod: &OfflinePod, compiled: &[EncodedResource]) -> Option<anyhow::Result<HeldResources>> {
        let read = |page: &[u8]| HeldResources::read(page, compiled.to_vec());
        match &self.held {
            Held::Running(mesh) => Some(ask(mesh, pod, RESOURCES).and_then(|page| read(&page))),
            Held::Served(control) => {
                let page = control.resources_of(pod);
                Some(page.and_then(|page| HeldResources::served(&page, compiled.to_vec())))
            }
            Held::Pages(pages) => {
                let page = pages.get(&(pod.namespace.clone(), pod.name.clone()))?;
                Some(read(page))
            }
        }
    }
}

/// Reads a page of a running proxy. `skysail call` does it, since a process that enters the network of a pod
/// cannot leave it.
fn ask(mesh: &str, pod: &OfflinePod, page: &str) -> anyhow::Result<Vec<u8>> {
    let url = format!("http://127.0.0.1:{ADMIN_PORT}/{page}");
    let workload = format!("{}/{}", pod.namespace, pod.name);
    let own = env::current_exe().context("cannot find this program's file")?;
    let output = Command::new(own)
        .args(["call", &workload, &url, "--max-time", "20", "--name", mesh])
        .output()
        .context("starting `skysail call`")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}
