//! Requests that arrive slowly, and the limits that delay them.

use tokio::task::{JoinHandle, yield_now};

use super::*;
use crate::{
    certificates::{self, CertificateService, Signer},
    istio::IstioCertificateRequest,
    limits::{BURST, IDENTITY_FACTOR, IDENTITY_MEMORY, INSTANCE_MEMORY, Identity, Reservation, TOTAL_MEMORY},
};

/// ReadAll requests until the client ends the stream.
struct ReadAll;

impl Service for ReadAll {
    fn has(&self, _: &str) -> bool {
        true
    }

    fn handle(&self, call: Call) -> CallFuture {
        let Call { extensions, requests, responses, account, .. } = call;
        let max = limits::MAX_REQUEST;
        let mut requests = Requests::<DeltaRequest>::new(requests, max, FIRST_REQUEST, &account, &extensions);
        Box::pin(async move {
            let status = loop {
                match requests.next().await {
                    Ok(Some(_)) => {}
                    Ok(None) => break Status::ok(""),
                    Err(status) => break status,
                }
            };
            responses.end(&status);
        })
    }
}

/// A call of a workload instance of an identity.
struct Caller {
    client: h2::client::SendRequest<Bytes>,
    requests: h2::SendStream<Bytes>,
    status: JoinHandle<Status>,
}

impl Caller {
    async fn new(limits: &Arc<Limits>, identity: &str, instance: &str) -> Self {
        Self::of(ReadAll, "/b", limits, (identity, instance)).await
    }

    /// Begins a call of a method of a service.
    async fn of(
        service: impl Service + 'static,
        method: &str,
        limits: &Arc<Limits>,
        (identity, instance): (&str, &str),
    ) -> Self {
        let (client, server) = tokio::io::duplex(1 << 20);
        let mut known = Extensions::new();
        known.insert(Identity { name: identity.into(), instance: Some(instance.into()) });
        let limits = Arc::clone(limits);
        tokio::spawn(async move { grpc::serve(server, known, &service, &limits, pending()).await });
        let (client, connection) = h2::client::handshake(client).await.unwrap();
        tokio::spawn(connection);
        Self::call(client, method).await
    }

    /// Begins another call on the same connection.
    async fn another(&self) -> Self {
        Self::call(self.client.clone(), "/b").await
    }

    async fn call(client: h2::client::SendRequest<Bytes>, method: &str) -> Self {
        let mut client = client.ready().await.unwrap();
        let request =
            http::Request::post(format!("http://a{method}")).header("content-type", "application/grpc");
        let (answer, requests) = client.send_request(request.body(()).unwrap(), false).unwrap();
        let status = tokio::spawn(async move {
            let answer = answer.await.unwrap();
            Status::from_header_map(answer.headers()).unwrap()
        });
        Self { client, requests, status }
    }

    fn send(&mut self, bytes: Bytes, end: bool) {
        self.requests.send_data(bytes, end).unwrap();
    }

    async fn code(self) -> tonic::Code {
        self.status.await.unwrap().code()
    }
}

/// Returns a request of about this length.
fn long(bytes: usize) -> Bytes {
    let name = "n".repeat(bytes);
    grpc::framed(&first(Kind::Endpoint, &[&name]))
}

/// Lets all other tasks run until they wait.
async fn run_other_tasks() {
    for _ in 0..10_000 {
        yield_now().await;
    }
}

fn reserve(limits: &Arc<Limits>, identity: &str, instance: &str) -> Reservation {
    Reservation::new(limits, &identity.into(), &instance.into(), INSTANCE_MEMORY)
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_request_times_out() {
    for length in [1, 100 << 10] {
        let limits = Arc::<Limits>::default();
        let mut caller = Caller::new(&limits, "a", "1").await;
        let whole = long(length);
        caller.send(whole.slice(..whole.len() - 1), false);
        assert_eq!(caller.code().await, tonic::Code::ResourceExhausted);
        assert_eq!(limits.reached(Bound::Incomplete), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_request_times_out() {
    let limits = Arc::<Limits>::default();
    let mut caller = Caller::new(&limits, "a", "1").await;
    caller.send(Bytes::new(), false);
    assert_eq!(caller.code().await, tonic::Code::DeadlineExceeded);
}

#[tokio::test]
async fn simultaneous_requests_of_replicas_are_all_served() {
    const REPLICAS: usize = 2 * IDENTITY_MEMORY / (3 << 20);
    let limits = Arc::<Limits>::default();
    let whole = long(3 << 20);
    let mut callers = Vec::new();
    for replica in 0..REPLICAS {
        let mut caller = Caller::new(&limits, "a", &replica.to_string()).await;
        // Every client sends its last byte after all have begun.
        caller.send(whole.slice(..whole.len() - 1), false);
        callers.push(caller);
    }
    // Some requests have memory reserved, and the others wait.
    while limits.reached(Bound::Incomplete) == 0 {
        yield_now().await;
    }
    for caller in &mut callers {
        caller.send(whole.slice(whole.len() - 1..), true);
    }
    for caller in callers {
        assert_eq!(caller.code().await, tonic::Code::Ok);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_memory_does_not_time_out_and_small_requests_pass() {
    let limits = Arc::<Limits>::default();
    let held: Vec<_> = (0..8)
        .flat_map(|identity| (0..4).map(move |instance| (identity.to_string(), instance.to_string())))
        .map(|(identity, instance)| reserve(&limits, &identity, &instance))
        .collect();
    assert_eq!(held.len() * INSTANCE_MEMORY, TOTAL_MEMORY);
    let mut waits = Caller::new(&limits, "a", "1").await;
    waits.send(long(100 << 10), true);
    for identity in ["a", "0"] {
        let mut small = Caller::new(&limits, identity, "2").await;
        for _ in 0..10 {
            small.send(long(60 << 10), false);
        }
        small.send(Bytes::new(), true);
        assert_eq!(small.code().await, tonic::Code::Ok, "of {identity}");
    }
    tokio::time::sleep(10 * limits::REQUEST_TIMEOUT).await;
    assert!(!waits.status.is_finished());
    drop(held);
    assert_eq!(waits.code().await, tonic::Code::Ok);
}

#[tokio::test(start_paused = true)]
async fn a_call_does_not_time_out_while_another_fills_the_connection_window() {
    let limits = Arc::<Limits>::default();
    let held = reserve(&limits, "a", "1");
    let mut waits = Caller::new(&limits, "a", "1").await;
    let mut small = waits.another().await;
    let whole = long(1_000);
    small.send(whole.slice(..10), false);
    run_other_tasks().await;
    waits.send(long(100 << 10), true);
    run_other_tasks().await;
    small.send(whole.slice(10..), true);
    tokio::time::sleep(10 * limits::REQUEST_TIMEOUT).await;
    assert!(!small.status.is_finished() && !waits.status.is_finished());
    drop(held);
    assert_eq!([waits.code().await, small.code().await], [tonic::Code::Ok; 2]);
}

#[tokio::test(start_paused = true)]
async fn only_replicas_with_debt_are_not_read() {
    let limits = Arc::<Limits>::default();
    let account = Arc::new(Account::new(Arc::clone(&limits), "test".into()));
    let caller = CallerAccount::new(&limits, &"a".into(), &"evil".into());
    let mut evil = [Caller::new(&limits, "a", "evil").await, Caller::new(&limits, "a", "evil").await];
    // One call begins before there is a debt.
    let whole = long(100);
    evil[0].send(whole.slice(..10), false);
    run_other_tasks().await;
    StreamAccount::enter(account, caller).unwrap().charge(2 * IDENTITY_FACTOR * BURST, 0, 0);
    evil[0].send(whole.slice(10..), true);
    evil[1].send(whole.clone(), true);
    for _ in 0..2 {
        let mut good = Caller::new(&limits, "a", "good").await;
        (0..100).for_each(|_| good.send(whole.clone(), false));
        good.send(long(1 << 20), true);
        assert_eq!(good.code().await, tonic::Code::Ok);
    }
    run_other_tasks().await;
    assert!(evil.iter().all(|caller| !caller.status.is_finished()));
    assert!(limits.reached(Bound::Pace) >= 2, "both are not read");
}

/// RefuseAll every call.
struct RefuseAll;

impl Views for RefuseAll {
    async fn connect(&self, _: Node, _: Form, _: Request<()>) -> Result<View, Status> {
        Err(Status::permission_denied("not you"))
    }
}

impl Signer for RefuseAll {
    async fn create_certificate(&self, _: Request<IstioCertificateRequest>) -> Result<Vec<String>, Status> {
        Err(Status::permission_denied("not you"))
    }
}

#[tokio::test(start_paused = true)]
async fn a_replica_waits_for_each_repeated_refusal() {
    let service = || {
        let refuses = Arc::new(RefuseAll);
        (DiscoveryService::new(Arc::clone(&refuses)), CertificateService::new(refuses))
    };
    for method in [wire::DELTA, certificates::METHOD] {
        let limits = Arc::<Limits>::default();
        // Each call has its own connection; the second one ends without a request.
        let refused = async |instance, request: Bytes| {
            let mut caller = Caller::of(service(), method, &limits, ("a", instance)).await;
            caller.send(request, true);
            caller
        };
        let request = if method == wire::DELTA { long(1) } else { Bytes::from_static(&[0; 5]) };
        let caller = CallerAccount::new(&limits, &"a".into(), &"evil".into());
        // The whole burst but one unit, so that a refusal exceeds it. At the rate of an identity, that debt is paid in
        // a quarter of a second, within which the assertion below must be checked.
        caller.charge(IDENTITY_FACTOR * BURST - 1);
        for request in [request.clone(), Bytes::new()] {
            let evil = refused("evil", request.clone()).await;
            run_other_tasks().await;
            assert!(!evil.status.is_finished(), "{method}: a call is answered after its debt is paid");
        }
        let good = refused("good", request).await;
        assert_eq!(good.code().await, tonic::Code::PermissionDenied, "{method}: another replica");
    }
}

/// The end of the requests is not the end of the client: it reads on.
#[tokio::test]
async fn a_client_that_ends_its_requests_gets_the_whole_response() {
    let names: Vec<String> = (0..2_000).map(|number| format!("cluster-{number:04}")).collect();
    let clusters: Vec<_> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let server = serve(world(&clusters), "127.0.0.1:0").await;
    let socket = TcpStream::connect(server.address).await.unwrap();
    let (client, mut connection) = h2::client::handshake(socket).await.unwrap();
    let mut client = alongside(&mut connection, client.ready()).await.unwrap();
    let request =
        http::Request::post(format!("http://a{}", wire::DELTA)).header("content-type", "application/grpc");
    let (answer, mut requests) = client.send_request(request.body(()).unwrap(), false).unwrap();
    requests.send_data(grpc::framed(&first(Kind::Cluster, &[])), true).unwrap();
    let mut body = alongside(&mut connection, answer).await.unwrap().into_body();
    let mut bytes = Vec::new();
    while let Some(piece) = alongside(&mut connection, body.data()).await {
        let piece = piece.unwrap();
        body.flow_control().release_capacity(piece.len()).unwrap();
        bytes.extend_from_slice(&piece);
    }
    assert!(bytes.len() > 1 << 16, "{} bytes", bytes.len());
    let response = wire::DeltaResponse::decode(&bytes[5..]).unwrap();
    assert_eq!(response.resources.len(), 2_000);
    let trailers = alongside(&mut connection, body.trailers()).await.unwrap().unwrap();
    assert_eq!(trailers["grpc-status"], "0");
}
