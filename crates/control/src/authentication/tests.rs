//! Callers over TLS connections on loopback, with a clock that the test sets.

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
use crate::{
    authority::AuthorityManager, certificates::CertificateSigner, serving, serving::ServerCertificate,
};

const HOUR: Duration = Duration::from_secs(3600);
const HIGH_LIMITS: Limits = Limits { total: 100, by_address: None, by_identity: None, evictable: 100 };

/// A control plane that issues certificates.
struct ControlPlane {
    authority: Arc<AuthorityManager>,
    issuer: Arc<Issuer>,
    platform: Arc<Platform>,
    clock: Arc<Mutex<SystemTime>>,
    connections: Arc<Connections>,
    address: SocketAddr,
    /// Starts the drain when dropped.
    _trigger: shutdown::Trigger,
}

/// A client certificate and its key.
struct ClientCertificate {
    pem: String,
    key: KeyAndCsr,
    identity: Identity,
}

impl ClientCertificate {
    fn origin(&self) -> Option<Origin> {
        Origin::of(&self.identity.chain()[0]).unwrap()
    }

    fn id(&self) -> String {
        self.identity.peer.spiffe.as_ref().unwrap().to_string()
    }
}

fn start(limits: Limits) -> ControlPlane {
    let lifetimes = Lifetimes { certificate: 48 * HOUR, root: 1000 * HOUR };
    let authority = Arc::new(AuthorityManager::open(None, lifetimes).unwrap());
    let platform = Arc::<Platform>::default();
    let aliases = vec!["old.example".to_owned()];
    platform.configure(&MeshConfig {
        trust_domain: "mesh.example".into(),
        trust_domain_aliases: aliases,
        ..MeshConfig::default()
    });
    let clock = Arc::new(Mutex::new(SystemTime::now()));
    serve(authority, Arc::new(Issuer::generate().unwrap()), platform, clock, limits, true)
}

fn serve(
    authority: Arc<AuthorityManager>,
    issuer: Arc<Issuer>,
    platform: Arc<Platform>,
    clock: Arc<Mutex<SystemTime>>,
    limits: Limits,
    accepts_tokens: bool,
) -> ControlPlane {
    let metrics = Arc::<Metrics>::default();
    let tokens = Live::empty();
    if accepts_tokens {
        tokens.set(Arc::new(Verifier::from_pem(issuer.public_pem().as_bytes(), "istio-ca").unwrap()));
    }
    let time = Arc::clone(&clock);
    let settings = AuthenticationSettings {
        trust_domain: None,
        token_interval: 24 * HOUR,
        clock: Arc::new(move || *time.lock().unwrap()),
    };
    let authentication =
        Arc::new(Authentication::new(tokens, settings, Arc::clone(&platform), Arc::clone(&metrics)));
    let local = IpAddr::from([127, 0, 0, 1]);
    let own = ServerCertificate::new(
        &authority,
        "mesh.example".into(),
        local,
        "istiod.istio-system.svc",
        48 * HOUR,
    )
    .unwrap();
    let signer = CertificateSigner::new(
        Arc::clone(&authority),
        Arc::clone(&authentication),
        48 * HOUR,
        metrics,
        AuditLog::none(),
    );
    let services = AuthenticatedService {
        services: CertificateService::new(Arc::new(signer)),
        authentication,
        audit: AuditLog::none(),
    };
    let listener = serving::listen((local, 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Connections::new(limits);
    let (trigger, shutdown) = shutdown::channel();
    let config = own.config().unwrap();
    let limits = (Arc::clone(&connections), Arc::default());
    tokio::spawn(serving::serve(listener, Some(config), Arc::new(services), limits, shutdown));
    ControlPlane { authority, issuer, platform, clock, connections, address, _trigger: trigger }
}

impl ControlPlane {
    /// Starts another replica with the same authority.
    fn replica(&self, accepts_tokens: bool) -> Self {
        let Self { authority, issuer, platform, clock, .. } = self;
        serve(authority.clone(), issuer.clone(), platform.clone(), clock.clone(), HIGH_LIMITS, accepts_tokens)
    }

    fn advance(&self, time: Duration) {
        *self.clock.lock().unwrap() += time;
    }

    fn token(&self, pod: Option<BoundPod>) -> String {
        let account = ServiceAccount { namespace: "default".into(), name: "reviews".into(), pod };
        format!("Bearer {}", self.issuer.issue(&account, "istio-ca", HOUR).unwrap())
    }

    /// Applies a file with a pod. The returned function removes the file.
    fn apply(&self, name: &str, uid: &str, address: &str) -> impl FnOnce() + use<> {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default, uid: '{uid}'}}\nspec: {{containers: [{{name: a, image: b}}]}}\nstatus: {{podIP: {address}}}\n"
        );
        let mut files = Files::default();
        let changes = files.take(0, "pod.yaml", parse(&text, "pod.yaml"));
        assert!(!changes.is_empty());
        changes.iter().for_each(|change| self.platform.apply(change));
        let platform = Arc::clone(&self.platform);
        move || files.remove(0, "pod.yaml").iter().for_each(|change| platform.apply(change))
    }

    /// Returns a certificate without [`Origin`], as another authority with these roots issues it.
    fn without_origin(&self, domain: &str) -> ClientCertificate {
        let key = KeyAndCsr::generate(None).unwrap();
        let csr = Csr::from_pem(&key.csr_pem).unwrap();
        let id = SpiffeId::new(domain, "default", "reviews");
        let pem = self.authority.current().issue(&csr, &id, 48 * HOUR, None).unwrap().chain.concat();
        let identity = key.finish(pem.as_bytes()).unwrap();
        ClientCertificate { pem, key, identity }
    }

    fn endpoint(&self, with: Option<&ClientCertificate>) -> Endpoint {
        let root = Certificate::from_pem(self.authority.current().roots_pem());
        let mut tls = ClientTlsConfig::new().ca_certificate(root).domain_name("istiod.istio-system.svc");
        if let Some(held) = with {
            tls = tls.identity(tonic::transport::Identity::from_pem(&held.pem, held.key.key_pem()));
        }
        Endpoint::from_shared(format!("https://{}", self.address)).unwrap().tls_config(tls).unwrap()
    }

    /// Requests a certificate with a client certificate and authorization headers. `named` is the identity in the CSR.
    async fn request(
        &self,
        with: Option<&ClientCertificate>,
        fields: &[&str],
        named: Option<&SpiffeId>,
    ) -> Result<ClientCertificate, Status> {
        let key = KeyAndCsr::generate(named).unwrap();
        let request = IstioCertificateRequest { csr: key.csr_pem.clone(), ..Default::default() };
        let mut metadata = MetadataMap::new();
        for field in fields {
            metadata.append("authorization", field.parse().unwrap());
        }
        let channel = self.endpoint(with).connect().await.unwrap();
        let pem = create_certificate(channel, metadata, request).await?.concat();
        let identity = key.finish(pem.as_bytes()).unwrap();
        Ok(ClientCertificate { pem, key, identity })
    }

    async fn assert_refused(&self, with: Option<&ClientCertificate>, fields: &[&str], why: &str) {
        let refused = self.request(with, fields, None).await.map(|held| held.id()).unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        assert!(refused.message().contains(why), "{refused}");
    }
}

#[tokio::test]
async fn a_valid_certificate_does_not_replace_a_refused_token() {
    let plane = start(HIGH_LIMITS);
    let good = plane.token(None);
    let held = plane.request(None, &[&good], None).await.unwrap();
    assert_eq!(held.id(), "spiffe://mesh.example/ns/default/sa/reviews");
    plane.request(Some(&held), &[], None).await.unwrap();
    plane.request(Some(&held), &[&good.replace("Bearer", "bearer")], None).await.unwrap();
    let account = ServiceAccount { namespace: "default".into(), name: "reviews".into(), pod: None };
    let elsewhere = format!("Bearer {}", plane.issuer.issue(&account, "vault", HOUR).unwrap());
    for (fields, why) in [
        (&["Bearer no.real.token"][..], "token"),
        (&[&*elsewhere], "InvalidAudience"),
        (&["Bearer"], ""),
        (&["Basic YTpi"], "authorization header is not"),
        (&[""], "authorization header is not"),
        // HTTP/2 combines them.
        (&[&*good, &*good], "token"),
    ] {
        plane.assert_refused(Some(&held), fields, why).await;
    }
    plane.assert_refused(None, &[], "neither a client certificate nor a bearer token").await;
    plane.replica(false).assert_refused(Some(&held), &[&good], "tokens are not accepted").await;
}

#[tokio::test]
async fn renewals_without_a_token_end_after_the_token_interval() {
    let plane = start(HIGH_LIMITS);
    let pod = BoundPod { name: "reviews-1".into(), uid: "1".into() };
    let first = plane.request(None, &[&plane.token(Some(pod.clone()))], None).await.unwrap();
    let origin = first.origin().unwrap();
    assert_eq!(origin.pod, Some(pod));
    let left = |held: &ClientCertificate| held.identity.not_after.duration_since(SystemTime::now()).unwrap();
    assert!(left(&first) > 47 * HOUR);

    let second = plane.request(Some(&first), &[], None).await.unwrap();
    assert_eq!(second.origin().as_ref(), Some(&origin), "a renewal keeps the time of the token");
    assert!(left(&second) <= 24 * HOUR, "limited to the token interval");
    plane.advance(20 * HOUR);
    let replica = plane.replica(true);
    let third = replica.request(Some(&second), &[], None).await.unwrap();
    assert_eq!(third.origin(), Some(origin));
    assert!(left(&third) <= 4 * HOUR);

    plane.advance(4 * HOUR);
    for plane in [&plane, &replica] {
        plane.assert_refused(Some(&first), &[], "--token-interval").await;
    }
    let fresh = plane.request(Some(&first), &[&plane.token(None)], None).await.unwrap();
    plane.advance(12 * HOUR);
    plane.request(Some(&fresh), &[], None).await.unwrap();
    // If the control plane accepts no tokens, it requires none for a renewal.
    plane.replica(false).request(Some(&first), &[], None).await.unwrap();
}

#[tokio::test]
async fn a_certificate_without_origin_is_not_renewed_beyond_its_expiry() {
    let plane = start(HIGH_LIMITS);
    let foreign = plane.without_origin("mesh.example");
    plane.advance(40 * HOUR);
    let renewed = plane.request(Some(&foreign), &[], None).await.unwrap();
    assert_eq!(renewed.origin(), None);
    let left = renewed.identity.not_after.duration_since(SystemTime::now()).unwrap();
    assert!(left <= 8 * HOUR, "{left:?}");
}

#[tokio::test]
async fn a_certificate_of_an_alias_is_renewed_in_its_own_trust_domain_only() {
    let plane = start(HIGH_LIMITS);
    let old = plane.without_origin("old.example");
    let [own, alias] =
        ["mesh.example", "old.example"].map(|domain| SpiffeId::new(domain, "default", "reviews"));
    for named in [None, Some(&alias)] {
        let renewed = plane.request(Some(&old), &[], named).await.unwrap();
        assert_eq!(renewed.id(), "spiffe://old.example/ns/default/sa/reviews");
    }
    let refused = plane.request(Some(&old), &[], Some(&own)).await.map(|held| held.id()).unwrap_err();
    assert!(refused.message().contains("it names spiffe://mesh.example"), "{refused}");
    let moved = plane.request(Some(&old), &[&plane.token(None)], Some(&own)).await.unwrap();
    assert_eq!(moved.id(), own.to_string(), "a token moves it to the new trust domain");
    plane
        .assert_refused(
            Some(&plane.without_origin("strange.example")),
            &[],
            "belongs to another trust domain",
        )
        .await;
}

#[tokio::test]
async fn an_ended_pod_is_refused_by_token_and_by_certificate() {
    let plane = start(HIGH_LIMITS);
    let pod = |uid: &str| Some(BoundPod { name: "reviews-1".into(), uid: uid.into() });
    let (first, second) = (plane.token(pod("1")), plane.token(pod("2")));
    let refusal = "pod default/reviews-1, which no longer exists";
    let _ = plane.apply("reviews-1", "1", "10.0.0.1");
    let held = plane.request(None, &[&first], None).await.unwrap();
    let renewed = plane.request(Some(&held), &[], None).await.unwrap();
    // Another pod with the same name.
    let delete = plane.apply("reviews-1", "2", "10.0.0.2");
    plane.assert_refused(None, &[&first], refusal).await;
    plane.assert_refused(Some(&held), &[], refusal).await;
    plane.assert_refused(Some(&renewed), &[], refusal).await;
    plane.assert_refused(Some(&held), &[&first], refusal).await;
    let successor = plane.request(None, &[&second], None).await.unwrap();
    delete();
    plane.assert_refused(None, &[&second], refusal).await;
    plane.assert_refused(Some(&successor), &[], refusal).await;
    plane.assert_refused(Some(&renewed), &[], "").await;

    // A certificate that names no pod: the address of the call counts.
    let foreign = plane.without_origin("mesh.example");
    let delete = plane.apply("local", "3", "127.0.0.1");
    plane.request(Some(&foreign), &[], None).await.unwrap();
    delete();
    plane
        .assert_refused(
            Some(&foreign),
            &[],
            "the call comes from the address of pod default/local, which no longer exists",
        )
        .await;
    let _ = plane.apply("next", "4", "127.0.0.1");
    plane.request(Some(&foreign), &[], None).await.unwrap();
}

#[tokio::test]
async fn connections_without_authentication_are_closed_when_the_limit_is_reached() {
    let plane = start(Limits { total: 40, by_address: None, by_identity: None, evictable: 4 });
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(plane.address).await.unwrap());
        plane.request(None, &[&plane.token(None)], None).await.unwrap();
    }
    // The oldest connections are closed.
    for mut first in silent.drain(..36) {
        assert!(first.read_u8().await.is_err(), "the connection is closed or reset");
    }
    assert!(plane.connections.sheds() >= 36 && plane.connections.open() <= 40);
}

#[test]
fn a_request_has_at_most_one_bearer_token() {
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
