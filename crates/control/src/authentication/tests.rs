//! Callers over real TLS connections, with a clock that is set.

use std::sync::Mutex;

use skysail_core::{
    connections::{Connections, Limits},
    shutdown,
};
use skysail_identity::{Csr, Identity, Issuer, KeyAndCsr, ServiceAccount, rotation::Lifetimes};
use skysail_model::{Files, api::MeshConfig, parse};
use skysail_xds::{
    certificates::{CertificateService, create_certificate},
    istio::IstioCertificateRequest,
};
use tokio::io::AsyncReadExt as _;
use tonic::{
    Code,
    metadata::MetadataMap,
    transport::{Certificate, ClientTlsConfig, Endpoint},
};

use super::*;
use crate::{authority::Keeper, certificates::Certificates, serving, serving::OwnCertificate};

const HOUR: Duration = Duration::from_secs(3600);
const ROOMY: Limits = Limits { most: 100, by_address: None, by_identity: None, unproven: 100 };

/// A control plane that issues certificates.
struct Plane {
    keeper: Arc<Keeper>,
    issuer: Arc<Issuer>,
    platform: Arc<Platform>,
    clock: Arc<Mutex<SystemTime>>,
    connections: Arc<Connections>,
    address: SocketAddr,
    /// It drains when this goes.
    _trigger: shutdown::Trigger,
}

/// A certificate and its key, as a client uses them.
struct Held {
    pem: String,
    key: KeyAndCsr,
    identity: Identity,
}

impl Held {
    fn origin(&self) -> Option<Origin> {
        Origin::of(&self.identity.chain()[0]).unwrap()
    }

    fn id(&self) -> String {
        self.identity.peer.spiffe.as_ref().unwrap().to_string()
    }
}

fn start(limits: Limits) -> Plane {
    let lifetimes = Lifetimes { certificate: 48 * HOUR, root: 1000 * HOUR };
    let keeper = Arc::new(Keeper::open(None, lifetimes).unwrap());
    let platform = Arc::<Platform>::default();
    let aliases = vec!["old.example".to_owned()];
    platform.configure(&MeshConfig {
        trust_domain: "mesh.example".into(),
        trust_domain_aliases: aliases,
        ..MeshConfig::default()
    });
    let clock = Arc::new(Mutex::new(SystemTime::now()));
    serve(keeper, Arc::new(Issuer::generate().unwrap()), platform, clock, limits, true)
}

fn serve(
    keeper: Arc<Keeper>,
    issuer: Arc<Issuer>,
    platform: Arc<Platform>,
    clock: Arc<Mutex<SystemTime>>,
    limits: Limits,
    takes_tokens: bool,
) -> Plane {
    let metrics = Arc::<Metrics>::default();
    let tokens = Live::empty();
    if takes_tokens {
        tokens.set(Arc::new(Verifier::from_pem(issuer.public_pem().as_bytes(), "istio-ca").unwrap()));
    }
    let time = Arc::clone(&clock);
    let settings = Settings {
        trust_domain: None,
        token_interval: 24 * HOUR,
        clock: Arc::new(move || *time.lock().unwrap()),
    };
    let authentication =
        Arc::new(Authentication::new(tokens, settings, Arc::clone(&platform), Arc::clone(&metrics)));
    let local = IpAddr::from([127, 0, 0, 1]);
    let own = OwnCertificate::new(&keeper, "mesh.example".into(), local, 48 * HOUR).unwrap();
    let signer = Certificates::new(
        Arc::clone(&keeper),
        Arc::clone(&authentication),
        48 * HOUR,
        metrics,
        Audit::none(),
    );
    let services =
        Guarded { services: CertificateService::new(Arc::new(signer)), authentication, audit: Audit::none() };
    let listener = serving::listen((local, 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Connections::new(limits);
    let (trigger, shutdown) = shutdown::channel();
    let config = own.config().unwrap();
    let limits = (Arc::clone(&connections), Arc::default());
    tokio::spawn(serving::serve(listener, Some(config), Arc::new(services), limits, shutdown));
    Plane { keeper, issuer, platform, clock, connections, address, _trigger: trigger }
}

impl Plane {
    /// Another replica, or the same after a restart.
    fn again(&self, takes_tokens: bool) -> Self {
        let Self { keeper, issuer, platform, clock, .. } = self;
        serve(keeper.clone(), issuer.clone(), platform.clone(), clock.clone(), ROOMY, takes_tokens)
    }

    fn pass(&self, time: Duration) {
        *self.clock.lock().unwrap() += time;
    }

    fn token(&self, pod: Option<BoundPod>) -> String {
        let account = ServiceAccount { namespace: "default".into(), name: "reviews".into(), pod };
        format!("Bearer {}", self.issuer.issue(&account, "istio-ca", HOUR).unwrap())
    }

    /// Takes in a file with a pod.
    fn apply(&self, name: &str, uid: &str, address: &str) -> impl FnOnce() + use<> {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default, uid: '{uid}'}}\nspec: {{containers: [{{name: a, image: b}}]}}\nstatus: {{podIP: {address}}}\n"
        );
        let mut files = Files::default();
        let changes = files.take(0, "pod.yaml", parse(&text, "pod.yaml"));
        assert!(!changes.is_empty());
        changes.iter().for_each(|change| self.platform.note(change));
        let platform = Arc::clone(&self.platform);
        move || files.remove(0, "pod.yaml").iter().for_each(|change| platform.note(change))
    }

    /// A certificate that another authority of these roots issued.
    fn foreign(&self, domain: &str) -> Held {
        let key = KeyAndCsr::generate(None).unwrap();
        let csr = Csr::from_pem(&key.csr_pem).unwrap();
        let id = SpiffeId::new(domain, "default", "reviews");
        let pem = self.keeper.current().issue(&csr, &id, 48 * HOUR, None).unwrap().chain.concat();
        let identity = key.finish(pem.as_bytes()).unwrap();
        Held { pem, key, identity }
    }

    fn endpoint(&self, with: Option<&Held>) -> Endpoint {
        let root = Certificate::from_pem(self.keeper.current().roots_pem());
        let mut tls = ClientTlsConfig::new().ca_certificate(root).domain_name("istiod.istio-system.svc");
        if let Some(held) = with {
            tls = tls.identity(tonic::transport::Identity::from_pem(&held.pem, held.key.key_pem()));
        }
        Endpoint::from_shared(format!("https://{}", self.address)).unwrap().tls_config(tls).unwrap()
    }

    /// Asks for a certificate with another, and with authorization fields; the request names somebody, or nobody.
    async fn ask(
        &self,
        with: Option<&Held>,
        fields: &[&str],
        named: Option<&SpiffeId>,
    ) -> Result<Held, Status> {
        let key = KeyAndCsr::generate(named).unwrap();
        let request = IstioCertificateRequest { csr: key.csr_pem.clone(), ..Default::default() };
        let mut metadata = MetadataMap::new();
        for field in fields {
            metadata.append("authorization", field.parse().unwrap());
        }
        let channel = self.endpoint(with).connect().await.unwrap();
        let pem = create_certificate(channel, metadata, request).await?.concat();
        let identity = key.finish(pem.as_bytes()).unwrap();
        Ok(Held { pem, key, identity })
    }

    async fn refused(&self, with: Option<&Held>, fields: &[&str], why: &str) {
        let refused = self.ask(with, fields, None).await.map(|held| held.id()).unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        assert!(refused.message().contains(why), "{refused}");
    }
}

#[tokio::test]
async fn a_refused_token_is_not_made_up_for_by_a_certificate() {
    let plane = start(ROOMY);
    let good = plane.token(None);
    let held = plane.ask(None, &[&good], None).await.unwrap();
    assert_eq!(held.id(), "spiffe://mesh.example/ns/default/sa/reviews");
    plane.ask(Some(&held), &[], None).await.unwrap();
    plane.ask(Some(&held), &[&good.replace("Bearer", "bearer")], None).await.unwrap();
    let account = ServiceAccount { namespace: "default".into(), name: "reviews".into(), pod: None };
    let elsewhere = format!("Bearer {}", plane.issuer.issue(&account, "vault", HOUR).unwrap());
    for (fields, why) in [
        (&["Bearer no.real.token"][..], "token"),
        (&[&*elsewhere], "InvalidAudience"),
        (&["Bearer "], ""),
        (&["Basic YTpi"], "authorization field is not"),
        (&[""], "authorization field is not"),
        (&[&*good, &*good], "several authorization fields"),
    ] {
        plane.refused(Some(&held), fields, why).await;
    }
    plane.refused(None, &[], "neither a client certificate nor a bearer token").await;
    plane.again(false).refused(Some(&held), &[&good], "tokens are not accepted here").await;
}

#[tokio::test]
async fn a_chain_of_renewals_without_a_token_ends() {
    let plane = start(ROOMY);
    let pod = BoundPod { name: "reviews-1".into(), uid: "1".into() };
    let first = plane.ask(None, &[&plane.token(Some(pod.clone()))], None).await.unwrap();
    let origin = first.origin().unwrap();
    assert_eq!(origin.pod, Some(pod));
    let left = |held: &Held| held.identity.not_after.duration_since(SystemTime::now()).unwrap();
    assert!(left(&first) > 47 * HOUR);

    let second = plane.ask(Some(&first), &[], None).await.unwrap();
    assert_eq!(second.origin().as_ref(), Some(&origin), "renewed, the token is as old as it was");
    assert!(left(&second) <= 24 * HOUR, "no longer than it could be renewed");
    plane.pass(20 * HOUR);
    let replica = plane.again(true);
    let third = replica.ask(Some(&second), &[], None).await.unwrap();
    assert_eq!(third.origin(), Some(origin));
    assert!(left(&third) <= 4 * HOUR);

    plane.pass(4 * HOUR);
    for plane in [&plane, &replica] {
        plane.refused(Some(&first), &[], "--token-interval").await;
    }
    let fresh = plane.ask(Some(&first), &[&plane.token(None)], None).await.unwrap();
    plane.pass(12 * HOUR);
    plane.ask(Some(&fresh), &[], None).await.unwrap();
    // Without tokens there is nothing that could be asked for instead.
    plane.again(false).ask(Some(&first), &[], None).await.unwrap();
}

#[tokio::test]
async fn a_certificate_that_tells_of_no_token_is_not_renewed_for_longer() {
    let plane = start(ROOMY);
    let foreign = plane.foreign("mesh.example");
    plane.pass(40 * HOUR);
    let renewed = plane.ask(Some(&foreign), &[], None).await.unwrap();
    assert_eq!(renewed.origin(), None);
    let left = renewed.identity.not_after.duration_since(SystemTime::now()).unwrap();
    assert!(left <= 8 * HOUR, "{left:?}");
}

#[tokio::test]
async fn a_certificate_of_an_alias_is_renewed_in_its_own_trust_domain_only() {
    let plane = start(ROOMY);
    let old = plane.foreign("old.example");
    let [own, alias] =
        ["mesh.example", "old.example"].map(|domain| SpiffeId::new(domain, "default", "reviews"));
    for named in [None, Some(&alias)] {
        let renewed = plane.ask(Some(&old), &[], named).await.unwrap();
        assert_eq!(renewed.id(), "spiffe://old.example/ns/default/sa/reviews");
    }
    let refused = plane.ask(Some(&old), &[], Some(&own)).await.map(|held| held.id()).unwrap_err();
    assert!(refused.message().contains("it names spiffe://mesh.example"), "{refused}");
    let moved = plane.ask(Some(&old), &[&plane.token(None)], Some(&own)).await.unwrap();
    assert_eq!(moved.id(), own.to_string(), "with a token it moves");
    plane.refused(Some(&plane.foreign("strange.example")), &[], "of another trust domain").await;
}

#[tokio::test]
async fn a_pod_that_is_gone_gets_nothing_by_token_or_certificate() {
    let plane = start(ROOMY);
    let pod = |uid: &str| Some(BoundPod { name: "reviews-1".into(), uid: uid.into() });
    let (first, second) = (plane.token(pod("1")), plane.token(pod("2")));
    let gone = "pod default/reviews-1, which is gone";
    let _ = plane.apply("reviews-1", "1", "10.0.0.1");
    let held = plane.ask(None, &[&first], None).await.unwrap();
    let renewed = plane.ask(Some(&held), &[], None).await.unwrap();
    // Another pod of its name.
    let delete = plane.apply("reviews-1", "2", "10.0.0.2");
    plane.refused(None, &[&first], gone).await;
    plane.refused(Some(&held), &[], gone).await;
    plane.refused(Some(&renewed), &[], gone).await;
    plane.refused(Some(&held), &[&first], gone).await;
    let successor = plane.ask(None, &[&second], None).await.unwrap();
    delete();
    plane.refused(None, &[&second], gone).await;
    plane.refused(Some(&successor), &[], gone).await;
    plane.refused(Some(&renewed), &[], "").await;

    // A certificate that tells of no pod: by the address of the call.
    let foreign = plane.foreign("mesh.example");
    let delete = plane.apply("local", "3", "127.0.0.1");
    plane.ask(Some(&foreign), &[], None).await.unwrap();
    delete();
    plane
        .refused(Some(&foreign), &[], "the call comes from the address of pod default/local, which is gone")
        .await;
    let _ = plane.apply("next", "4", "127.0.0.1");
    plane.ask(Some(&foreign), &[], None).await.unwrap();
}

#[tokio::test]
async fn who_has_not_authenticated_makes_room_for_others() {
    let plane = start(Limits { most: 40, by_address: None, by_identity: None, unproven: 4 });
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(plane.address).await.unwrap());
        plane.ask(None, &[&plane.token(None)], None).await.unwrap();
    }
    // Those who were there first are closed.
    for mut first in silent.drain(..36) {
        assert!(first.read_u8().await.is_err(), "it is closed, or reset");
    }
    assert!(plane.connections.sheds() >= 36 && plane.connections.open() <= 40);
}

#[test]
fn the_one_bearer_token_of_a_call_or_page_is_its_credential() {
    let of = |values: &[&'static str]| {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(AUTHORIZATION, value.parse().unwrap());
        }
        bearer(&headers).map(|token| token.map(str::to_owned)).map_err(|status| status.code())
    };
    assert_eq!(of(&[]), Ok(None));
    assert_eq!(of(&["Bearer a"]), Ok(Some("a".to_owned())));
    assert_eq!(of(&["bearer  a"]), Ok(Some("a".to_owned())));
    for wrong in [&["Basic a"][..], &["Bearer"], &["Bearer "], &["Bearer a", "Bearer b"]] {
        assert_eq!(of(wrong), Err(Code::Unauthenticated), "{wrong:?}");
    }
}
