//! Configuration of the proxies of a mesh.

use std::{cell::RefCell, collections::HashMap, rc::Rc};

use skysail_model::{ClientScope, ProxyView, compile};
use skysail_proxy::explain::{Configuration, Resource};
use skysail_sandbox::{Offline, OfflinePod};
use skysail_xds::Kind;

/// Proxies of a mesh.
pub(super) struct Proxies<'a> {
    /// Objects, pods and names.
    pub(super) mesh: &'a Offline,
    /// Proxies by pod: namespace and name.
    loaded: RefCell<HashMap<(String, String), Option<Rc<Proxy>>>>,
}

/// A proxy and its configuration.
pub(super) struct Proxy {
    /// Configuration.
    pub(super) configuration: Configuration,
    /// View of the proxy.
    pub(super) view: ProxyView,
    /// Scope in which its routes are compiled.
    pub(super) scope: ClientScope,
}

impl<'a> Proxies<'a> {
    /// Returns proxies that get what the control plane compiles.
    pub(super) fn compiled(mesh: &'a Offline) -> Self {
        Self { mesh, loaded: RefCell::default() }
    }

    /// Returns the proxy of a pod; `None` if the control plane would refuse it.
    pub(super) fn of(&self, pod: &OfflinePod) -> Option<Rc<Proxy>> {
        let key = (pod.namespace.clone(), pod.name.clone());
        let mut loaded = self.loaded.borrow_mut();
        loaded.entry(key).or_insert_with(|| self.load(pod).map(Rc::new)).clone()
    }

    fn load(&self, pod: &OfflinePod) -> Option<Proxy> {
        let world = &self.mesh.world;
        let view = pod.proxy(world)?.view;
        let (made, _) = compile(world, &view);
        let mut resources = Vec::new();
        for kind in [Kind::Cluster, Kind::Endpoint, Kind::Route, Kind::Listener] {
            resources.extend(made.iter(kind).map(|resource| Resource {
                kind,
                name: resource.name.to_string(),
                body: resource.body.clone(),
            }));
        }
        let scope = ClientScope::of(&view, &world.grouping());
        Some(Proxy { configuration: Configuration::load(&resources), view, scope })
    }
}
