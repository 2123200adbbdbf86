//! A mesh whose sidecars are all `skysail-proxy` or all Envoy, and the comparison of what it does with a
//! patch and without.

use std::{fs, net::TcpStream, path::Path};

use skysail_testkit::{Client, Mesh, Setup, eventually};

use crate::{SHOP, services::Services};

/// A route of the mesh, and the same with retries.
const ROUTE: &str = "    - name: weighted\n";
const RETRIED: &str = "    - name: weighted\n      retries: {attempts: 2, retryOn: 5xx}\n";

/// A pod without a sidecar. It has the echo server, and the services that filters ask.
const HELPER: &str = "
---
apiVersion: v1
kind: Service
metadata: {name: helper, namespace: shop}
spec:
  selector: {app: helper}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: grpc, port: 9081}]
---
apiVersion: v1
kind: Pod
metadata: {name: helper, namespace: shop, labels: {app: helper, sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: registry.example/shop/helper, ports: [{containerPort: 8080}]}]}
";

/// File of the patch in the configuration.
const PATCH: &str = "patch.yaml";

/// The proxies of the workloads `front` and `stock-v1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Sidecar,
    Envoy,
}

/// Result of one observation of the mesh.
pub(crate) struct Observed {
    /// `None` if it is neither the effect of the patch nor what happens without it.
    pub(crate) acts: Option<bool>,
    pub(crate) text: String,
}

pub(crate) struct Scene {
    /// Dropped before the mesh, whose end would end their pod.
    _services: Services,
    pub(crate) mesh: Mesh,
    pub(crate) side: Side,
}

impl Observed {
    /// Compares what is there with the effect and with its absence.
    pub(crate) fn either(acts: bool, lacks: bool, text: impl Into<String>) -> Self {
        assert!(!acts || !lacks, "the effect and its absence cannot both be there");
        Self { acts: (acts || lacks).then_some(acts), text: text.into() }
    }
}

impl Scene {
    /// Starts a mesh. Its port `stock-v1:9090` is published, for clients without a sidecar.
    pub(crate) fn of(side: Side) -> Self {
        let shop = SHOP.replace("STRICT", "PERMISSIVE").replace(ROUTE, RETRIED);
        assert!(shop.contains("PERMISSIVE") && shop.contains(RETRIED));
        let text = [&shop, HELPER].concat();
        let setup =
            Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).with(&["-p", "0:shop/stock-v1:9090"]);
        let setup = match side {
            Side::Sidecar => setup,
            Side::Envoy => setup.with_envoys(&["shop/front", "shop/stock-v1"]),
        };
        let mesh = setup.ready();
        let services = Services::start(&mesh);
        mesh.wait_status("front", "http://stock.shop/", &[], 200);
        Self { _services: services, mesh, side }
    }

    /// Waits until the mesh shows the effect of a patch, and after its removal until it does not. Each of
    /// `changes` is a text of the file and its replacement.
    pub(crate) fn compare(&self, file: &str, changes: &[(&str, &str)], observe: impl Fn(&Self) -> Observed) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/envoy_filters").join(file);
        let mut text = fs::read_to_string(path).unwrap();
        for (from, to) in changes {
            assert!(text.contains(from), "{file}: {from}");
            text = text.replacen(from, to, 1);
        }
        for (what, text, acts) in [(file.to_owned(), &*text, true), (format!("without {file}"), "", false)] {
            // The patch before goes with this one.
            self.mesh.put(PATCH, text);
            eventually(&format!("{what}, {:?}", self.side), || {
                let Observed { acts: seen, text } = observe(self);
                if seen == Some(acts) { Ok(()) } else { Err(format!("{seen:?}: {text}")) }
            });
        }
    }

    /// Checks that no proxy has refused a patch, except one with the field that the sidecar refuses.
    pub(crate) fn assert_accepted(&self) {
        let output = self.mesh.output();
        let mut refused = output.lines().filter(|line| line.contains("refuses resources"));
        assert!(refused.all(|line| line.contains("represent_ipv4_remote_address")), "{output}");
    }

    /// Opens a connection to the pod of `stock-v1` from outside of the mesh.
    pub(crate) fn connect(&self) -> TcpStream {
        Client::plain(self.mesh.published("shop/stock-v1:9090")).connect().unwrap()
    }

    /// Returns a page of the administration interface of a workload's proxy.
    pub(crate) fn page(&self, workload: &str, path: &str) -> String {
        self.mesh.call(workload, &format!("http://127.0.0.1:15000{path}"), &[]).body
    }

    /// Returns the address of the only pod of a workload.
    pub(crate) fn address(&self, workload: &str) -> String {
        let status = self.mesh.status();
        let mut pods = status["pods"].as_array().unwrap().iter();
        let pod = pods.find(|pod| pod["workload"] == workload).unwrap();
        pod["address"].as_str().unwrap().to_owned()
    }
}
