//! Reads gRPC messages from a stream. Memory is held only for the received part of a message, because there are
//! thousands of mostly idle streams.

use std::{future::poll_fn, marker::PhantomData, sync::Arc, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::FutureExt as _;
use prost::{
    Message,
    encoding::{DecodeContext, decode_key, skip_field},
};
use skysail_http::http2::StreamError;
use tokio::{
    task::yield_now,
    time::{Instant, sleep, timeout_at},
};
use tonic::{Code, Extensions, Status};

use super::connection::CallStream;
use crate::limits::{self, Account, Bound, CallerAccount, Identity, Place, Wait};

/// Length of the prefix of a message: compression flag and message length.
const PREFIX: usize = 5;
/// First and maximum pause between checks of a call that owes too much.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(4);

/// Encodes a message with its prefix.
pub(crate) fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    // No client can receive a longer message.
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut bytes);
    bytes.freeze()
}

/// The requests of a call, each a message `R`.
pub(crate) struct Requests<R> {
    stream: Arc<CallStream>,
    partial: PartialMessage,
    /// Received bytes that are not released to the flow control window.
    unreleased: usize,
    /// Maximum length of a request, in bytes.
    max_length: usize,
    account: Arc<Account>,
    identity: Arc<str>,
    instance: Arc<str>,
    /// Account to which requests are charged; `None` until the caller is known.
    caller: Option<Arc<CallerAccount>>,
    /// Memory reservation of the request that has begun.
    place: Option<Place>,
    /// Timeout for the start of the next request; `None` after the first request.
    begin_timeout: Option<Duration>,
    /// Deadline for the start or the end of a request, and the number of the connection's waits when it was set.
    deadline: Option<(Instant, Option<usize>)>,
    kind: PhantomData<fn() -> R>,
}

impl<R: Message + Default> Requests<R> {
    /// Creates the requests of a stream, each of at most `max_length` bytes. The extensions of the call name the
    /// caller. The first request must begin within `begin_timeout`.
    pub(crate) fn new(
        stream: Arc<CallStream>,
        max_length: usize,
        begin_timeout: Duration,
        account: &Arc<Account>,
        extensions: &Extensions,
    ) -> Self {
        let instance = limits::instance(extensions);
        let proven = extensions.get::<Identity>().map(|identity| Arc::clone(&identity.name));
        let caller =
            proven.as_ref().map(|name| Arc::new(CallerAccount::new(&account.limits, name, &instance)));
        Self {
            stream,
            partial: PartialMessage::default(),
            unreleased: 0,
            max_length,
            account: Arc::clone(account),
            // Callers without an identity share the limits of one identity.
            identity: proven.unwrap_or_default(),
            instance,
            caller,
            place: None,
            begin_timeout: Some(begin_timeout),
            deadline: None,
            kind: PhantomData,
        }
    }

    /// Returns the workload instance that sends the requests.
    pub(crate) fn instance(&self) -> &Arc<str> {
        &self.instance
    }

    /// Sets the caller to which requests are charged from now on.
    pub(crate) fn charge_to(&mut self, caller: &Arc<CallerAccount>) {
        self.caller = Some(Arc::clone(caller));
    }

    /// Returns the next request and its length; `None` when the client has ended the stream, even within a request.
    /// Cancel safe.
    ///
    /// Returns a complete request when neither the connection nor its caller owes too much. Only then, and after
    /// memory is reserved, continues to read an incomplete one, which must be completed in time. A request that holds
    /// shared memory is neither delayed nor given more time, because others wait for that memory.
    pub(crate) async fn next(&mut self) -> Result<Option<(R, usize)>, Status> {
        loop {
            if let Some(length) =
                self.partial.length(self.max_length).map_err(|status| self.refused(status))?
            {
                let is_whole = self.partial.0.len() >= length;
                if !matches!(&self.place, Some(Place::Shared(shared)) if shared.is_granted()) {
                    if is_whole || self.place.is_none() {
                        self.wait_for_pace().await;
                    }
                    if !is_whole {
                        self.wait_for_memory(length).await;
                    }
                }
                if is_whole {
                    let request = self.partial.take(length).map_err(|status| self.refused(status))?;
                    (self.place, self.begin_timeout, self.deadline) = (None, None, None);
                    self.release();
                    return Ok(Some((request, length)));
                }
            }
            if self.place.is_some() || self.partial.0.len() < PREFIX {
                self.release();
            }
            let Some(data) = self.data().await? else { return Ok(None) };
            if self.partial.0.is_empty() {
                self.deadline = None;
            }
            self.unreleased += data.len();
            // The connection was charged `FRAME_BYTE_COST` for each of these bytes. A byte of a request costs one unit.
            self.account.pace.refund((limits::FRAME_BYTE_COST - 1) * data.len() as u64);
            self.partial.0.extend_from_slice(&data);
        }
    }

    /// Charges the caller for a refused call, unless the server is at fault or the client has left. Then waits while
    /// the connection or the caller owes too much: a client that repeats such calls at once, also on new connections,
    /// waits for each.
    pub(crate) async fn charge_refusal(&mut self, status: &Status) {
        let not_its_own = [Code::Cancelled, Code::DeadlineExceeded, Code::Internal, Code::Unavailable];
        if let Some(caller) = &self.caller
            && !not_its_own.contains(&status.code())
        {
            caller.charge(limits::REFUSAL_COST);
        }
        self.wait_for_pace().await;
    }

    /// Returns the time until the connection and its caller may do more; `None` if they owe too little to wait.
    pub(crate) fn debt(&self) -> Option<Duration> {
        let caller = self.caller.as_ref().and_then(|caller| caller.wait());
        self.account.pace.wait().max(caller)
    }

    /// Waits while the connection or its caller owes too much.
    async fn wait_for_pace(&mut self) {
        let Some(mut wait) = self.debt() else { return };
        let _wait = Wait::new(&self.account);
        self.deadline = None;
        self.account.limits.record(Bound::Pace, &self.account.client);
        // Thousands of calls may wait for the same debt, and each payment admits one. The pause of each call
        // therefore grows.
        let mut pause = Duration::ZERO;
        loop {
            sleep(wait.max(pause.mul_f64(0.5 + 0.5 * fastrand::f64()))).await;
            let Some(more) = self.debt() else { return };
            (wait, pause) = (more, (2 * pause).clamp(FIRST_PAUSE, MAX_PAUSE));
        }
    }

    /// Waits until memory for a request of this length is reserved.
    async fn wait_for_memory(&mut self, length: usize) {
        let Self { account, identity, instance, place, .. } = self;
        let is_new = place.is_none();
        let place = place.get_or_insert_with(|| Place::of(account, identity, instance, length));
        let Place::Shared(reservation) = place else { return };
        if reservation.is_granted() {
            return;
        }
        if is_new {
            account.limits.record(Bound::Incomplete, &account.client);
        }
        let _wait = Wait::new(account);
        self.deadline = None;
        reservation.granted().await;
    }

    /// Releases the received bytes to the flow control window.
    fn release(&mut self) {
        let bytes = std::mem::take(&mut self.unreleased);
        if bytes > 0 {
            self.stream.release(bytes);
        }
    }

    /// Returns the next data. Fails if a request is not begun or not completed in time.
    async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        let limit =
            if self.partial.0.is_empty() { self.begin_timeout } else { Some(limits::REQUEST_TIMEOUT) };
        let stream = Arc::clone(&self.stream);
        let mut data = poll_fn(move |cx| stream.poll_data(cx));
        let Some(limit) = limit else { return data.await.map_err(broken) };
        loop {
            let set = || (Instant::now() + limit, self.account.waited());
            let (deadline, waited) = *self.deadline.get_or_insert_with(set);
            if let Ok(data) = timeout_at(deadline, &mut data).await {
                return data.map_err(broken);
            }
            // A connection that owes too much is not read. A call that waits may fill the connection's window.
            let was_held_up = waited.is_none() || self.account.waited() != waited;
            if (was_held_up || self.account.pace.wait().is_some())
                && !matches!(self.place, Some(Place::Shared(_)))
            {
                self.deadline = None;
                continue;
            }
            // A busy server may not have read the data that has arrived.
            yield_now().await;
            if let Some(data) = (&mut data).now_or_never() {
                return data.map_err(broken);
            }
            if self.partial.0.is_empty() {
                return Err(Status::deadline_exceeded("no request was received in time"));
            }
            let what = format!("the request was not complete after {:?}", limits::REQUEST_TIMEOUT);
            return Err(self.account.limits.exhausted(Bound::Incomplete, &self.account.client, what));
        }
    }

    fn refused(&self, status: Status) -> Status {
        if status.code() == Code::ResourceExhausted {
            self.account.limits.record(Bound::Request, &self.account.client);
        }
        status
    }
}

fn broken(error: StreamError) -> Status {
    Status::cancelled(error.to_string())
}

/// The received part of the next message.
#[derive(Default)]
pub(crate) struct PartialMessage(pub(crate) BytesMut);

impl PartialMessage {
    /// Returns the length of the next message with its prefix, if the prefix has arrived. Fails if the length is not
    /// allowed.
    pub(crate) fn length(&self, max_length: usize) -> Result<Option<usize>, Status> {
        let Some((prefix, _)) = self.0.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let [compressed, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        if compressed != 0 {
            return Err(Status::unimplemented("the request is compressed, which is not supported"));
        }
        if length > max_length {
            return Err(Status::resource_exhausted(format!(
                "the request has {length} bytes; the limit is {max_length}"
            )));
        }
        Ok(Some(PREFIX + length))
    }

    /// Takes out the next message, which has this length and is complete.
    fn take<R: Message + Default>(&mut self, length: usize) -> Result<R, Status> {
        let content = self.0.get(PREFIX..length).unwrap_or_default();
        check_fields(content)?;
        let request = R::decode(content).map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.0.advance(length);
        if self.0.is_empty() {
            self.0 = BytesMut::new();
        }
        Ok(request)
    }

    /// Takes out the next message, if it is complete.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn complete<R: Message + Default>(&mut self, max_length: usize) -> Result<Option<R>, Status> {
        match self.length(max_length)? {
            Some(length) if self.0.len() >= length => self.take(length).map(Some),
            _ => Ok(None),
        }
    }
}

/// Refuses a message of too many fields before memory is allocated for them.
fn check_fields(mut message: &[u8]) -> Result<(), Status> {
    // A field takes at least two bytes.
    if message.len() < 2 * limits::MAX_FIELDS {
        return Ok(());
    }
    let mut fields = 0;
    while !message.is_empty() {
        let skip = |message: &mut &[u8]| {
            let (field, kind) = decode_key(message)?;
            skip_field(kind, field, message, DecodeContext::default())
        };
        skip(&mut message).map_err(|error| Status::invalid_argument(error.to_string()))?;
        fields += 1;
    }
    if fields <= limits::MAX_FIELDS {
        return Ok(());
    }
    let limit = limits::MAX_FIELDS;
    Err(Status::resource_exhausted(format!("the request has {fields} fields; the limit is {limit}")))
}

#[cfg(test)]
mod tests {
    use skysail_proto::envoy::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

    use super::*;

    fn request(nonce: &str) -> Bytes {
        framed(&DeltaDiscoveryRequest { response_nonce: nonce.into(), ..DeltaDiscoveryRequest::default() })
    }

    /// Reads requests that arrive in pieces of this length.
    fn read(bytes: &[u8], piece: usize) -> Vec<Result<String, tonic::Code>> {
        let mut partial = PartialMessage::default();
        let mut read = Vec::new();
        for piece in bytes.chunks(piece) {
            partial.0.extend_from_slice(piece);
            loop {
                match partial.complete::<DeltaDiscoveryRequest>(1 << 20) {
                    Ok(None) => break,
                    Ok(Some(request)) => read.push(Ok(request.response_nonce)),
                    Err(status) => {
                        read.push(Err(status.code()));
                        return read;
                    }
                }
            }
        }
        read
    }

    #[test]
    fn requests_are_read_in_pieces_of_any_length() {
        let bytes = [request("1"), request(""), request("three")].concat();
        for piece in 1..=bytes.len() {
            let expected = ["1", "", "three"].map(|nonce| Ok(nonce.to_owned()));
            assert_eq!(read(&bytes, piece), expected, "in pieces of {piece}");
        }
        assert_eq!(read(&bytes[..bytes.len() - 1], 7).len(), 2, "the last request is not complete");
    }

    #[test]
    fn a_request_of_too_many_fields_is_not_decoded() {
        let names = |count| DeltaDiscoveryRequest {
            resource_names_subscribe: vec![String::new(); count],
            ..DeltaDiscoveryRequest::default()
        };
        assert_eq!(read(&framed(&names(limits::MAX_FIELDS)), usize::MAX), [Ok(String::new())]);
        assert_eq!(read(&framed(&names(limits::MAX_FIELDS + 1)), usize::MAX), [Err(Code::ResourceExhausted)]);
    }

    #[test]
    fn invalid_messages_are_refused() {
        assert_eq!(read(&[1, 0, 0, 0, 0], 5), [Err(tonic::Code::Unimplemented)]);
        assert_eq!(read(&[0, 0xff, 0, 0, 0], 5), [Err(tonic::Code::ResourceExhausted)]);
        assert_eq!(read(&[0, 0, 0, 0, 1, 0xff], 6), [Err(tonic::Code::InvalidArgument)]);
    }
}
