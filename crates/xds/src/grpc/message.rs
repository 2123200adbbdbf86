//! gRPC's messages as they stand on a stream. No more memory is held than there is of a message that has begun: streams are
//! thousands, and say little.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::FutureExt as _;
use h2::RecvStream;
use prost::{
    Message,
    encoding::{DecodeContext, decode_key, skip_field},
};
use tokio::{
    task::yield_now,
    time::{Instant, sleep, timeout_at},
};
use tonic::{Code, Extensions, Status};

use crate::limits::{self, Account, Bound, Identity, Payer, Place, Waiting};

/// Whether a message is compressed, and how long it is.
const PREFIX: usize = 5;
/// How long a call that owes too much waits before it looks again, at first and at most, if there is still a debt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// A message with what goes before it.
pub(crate) fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    // Longer messages cannot be received by anybody.
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut bytes);
    bytes.freeze()
}

/// The requests of a call, each a message `R`.
pub(crate) struct Requests<R> {
    stream: RecvStream,
    begun: PartialMessage,
    /// Bytes of it that the client may not send as many more for yet.
    unreleased: usize,
    /// The longest that is read, in bytes.
    most: usize,
    account: Arc<Account>,
    identity: Arc<str>,
    instance: Arc<str>,
    /// The account that requests are charged to; absent until the caller is known.
    payer: Option<Arc<Payer>>,
    /// Where the request that has begun is held.
    place: Option<Place>,
    /// How long the client may take to begin the next request.
    patience: Option<Duration>,
    /// When it must have begun, or the request that has begun must be complete, and the waits of the connection when that was set.
    until: Option<(Instant, Option<usize>)>,
    kind: PhantomData<fn() -> R>,
}

impl<R: Message + Default> Requests<R> {
    /// The requests on a stream, of at most so many bytes each, from whom the call's extensions say. The first must begin within
    /// `patience`.
    pub(crate) fn new(
        stream: RecvStream,
        most: usize,
        patience: Duration,
        account: &Arc<Account>,
        extensions: &Extensions,
    ) -> Self {
        let instance = limits::instance(extensions);
        let proven = extensions.get::<Identity>().map(|identity| Arc::clone(&identity.name));
        let payer = proven.as_ref().map(|name| Arc::new(Payer::new(&account.limits, name, &instance)));
        Self {
            stream,
            begun: PartialMessage::default(),
            unreleased: 0,
            most,
            account: Arc::clone(account),
            // Those who prove nothing share what an identity has.
            identity: proven.unwrap_or_default(),
            instance,
            payer,
            place: None,
            patience: Some(patience),
            until: None,
            kind: PhantomData,
        }
    }

    /// The workload instance that they come from.
    pub(crate) fn instance(&self) -> &Arc<str> {
        &self.instance
    }

    /// Sets whom requests are charged to from now on.
    pub(crate) fn charge(&mut self, payer: &Arc<Payer>) {
        self.payer = Some(Arc::clone(payer));
    }

    /// The next request and its length; `None` when the client has no more. May be dropped and called again.
    ///
    /// A request that has come is taken in once neither the connection nor its payer owes too much. One that has not come in whole
    /// is read on once that is so and it has a place; from then on it must be completed in time. One in the room that others wait for
    /// is neither held up nor given more time.
    pub(crate) async fn next(&mut self) -> Result<Option<(R, usize)>, Status> {
        loop {
            if let Some(length) = self.begun.length(self.most).map_err(|status| self.refused(status))? {
                let is_whole = self.begun.0.len() >= length;
                if !matches!(&self.place, Some(Place::Shared(shared)) if shared.is_granted()) {
                    if is_whole || self.place.is_none() {
                        self.affordable().await;
                    }
                    if !is_whole {
                        self.placed(length).await;
                    }
                }
                if is_whole {
                    let request = self.begun.take(length).map_err(|status| self.refused(status))?;
                    (self.place, self.patience, self.until) = (None, None, None);
                    self.release()?;
                    return Ok(Some((request, length)));
                }
            }
            if self.place.is_some() || self.begun.0.len() < PREFIX {
                self.release()?;
            }
            let Some(data) = self.data().await? else { return Ok(None) };
            if self.begun.0.is_empty() {
                self.until = None;
            }
            self.unreleased += data.len();
            // The connection was charged for it as for any other byte.
            self.account.pace.refund((limits::FRAME_BYTE - 1) * data.len() as u64);
            self.begun.0.extend_from_slice(&data);
        }
    }

    /// Charges the caller for a call that is refused, unless that is the server's own fault or the client has left, and waits while
    /// the connection or the caller owes too much: a client that repeats such calls at once, also on new connections, waits for each.
    pub(crate) async fn pay_refusal(&mut self, status: &Status) {
        let not_its_own = [Code::Cancelled, Code::DeadlineExceeded, Code::Internal, Code::Unavailable];
        if let Some(payer) = &self.payer
            && !not_its_own.contains(&status.code())
        {
            payer.spend(limits::REFUSAL);
        }
        self.affordable().await;
    }

    /// Waits while the connection or its payer owes too much.
    async fn affordable(&mut self) {
        let owes = || {
            let payer = self.payer.as_ref().and_then(|payer| payer.wait());
            self.account.pace.wait().max(payer)
        };
        let Some(mut wait) = owes() else { return };
        let _waiting = Waiting::new(&self.account);
        self.until = None;
        self.account.limits.note(Bound::Pace, &self.account.client);
        // Thousands of calls may wait for the same debt, and each payment admits one. So the pause of each call grows.
        let mut pause = Duration::ZERO;
        loop {
            sleep(wait.max(pause.mul_f64(0.5 + 0.5 * fastrand::f64()))).await;
            let Some(more) = owes() else { return };
            (wait, pause) = (more, (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE));
        }
    }

    /// Waits until a request of this length has a place.
    async fn placed(&mut self, length: usize) {
        let Self { account, identity, instance, place, .. } = self;
        let is_new = place.is_none();
        let place = place.get_or_insert_with(|| Place::of(account, identity, instance, length));
        let Place::Shared(reservation) = place else { return };
        if reservation.is_granted() {
            return;
        }
        if is_new {
            account.limits.note(Bound::Incomplete, &account.client);
        }
        let _waiting = Waiting::new(account);
        self.until = None;
        reservation.granted().await;
    }

    /// Lets the client send as much more as has come.
    fn release(&mut self) -> Result<(), Status> {
        let bytes = std::mem::take(&mut self.unreleased);
        if bytes > 0 {
            self.stream.flow_control().release_capacity(bytes).map_err(broken)?;
        }
        Ok(())
    }

    /// Returns the next request. Fails if a request is not begun or not completed in time.
    async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        let limit = if self.begun.0.is_empty() { self.patience } else { Some(limits::REST) };
        let Some(limit) = limit else { return self.stream.data().await.transpose().map_err(broken) };
        loop {
            let set = || (Instant::now() + limit, self.account.waited());
            let (until, waited) = *self.until.get_or_insert_with(set);
            if let Ok(data) = timeout_at(until, self.stream.data()).await {
                return data.transpose().map_err(broken);
            }
            // A connection that owes too much is not read, and a call that waits may fill the connection's window.
            let was_held_up = waited.is_none() || self.account.waited() != waited;
            if (was_held_up || self.account.pace.wait().is_some())
                && !matches!(self.place, Some(Place::Shared(_)))
            {
                self.until = None;
                continue;
            }
            // A busy server may not have read what has come.
            yield_now().await;
            if let Some(data) = self.stream.data().now_or_never() {
                return data.transpose().map_err(broken);
            }
            if self.begun.0.is_empty() {
                return Err(Status::deadline_exceeded("no request came"));
            }
            let what = format!("a request was not complete after {:?}", limits::REST);
            return Err(self.account.limits.exhausted(Bound::Incomplete, &self.account.client, what));
        }
    }

    fn refused(&self, status: Status) -> Status {
        if status.code() == Code::ResourceExhausted {
            self.account.limits.note(Bound::Request, &self.account.client);
        }
        status
    }
}

fn broken(error: h2::Error) -> Status {
    Status::cancelled(error.to_string())
}

/// What has come of the next message.
#[derive(Default)]
pub(crate) struct PartialMessage(pub(crate) BytesMut);

impl PartialMessage {
    /// The length of the next message with what goes before it, if enough of it is there to tell. Fails if nobody may send it.
    pub(crate) fn length(&self, most: usize) -> Result<Option<usize>, Status> {
        let Some((prefix, _)) = self.0.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let [compressed, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        if compressed != 0 {
            return Err(Status::unimplemented(
                "the request is compressed, which no answer said was possible",
            ));
        }
        if length > most {
            return Err(Status::resource_exhausted(format!(
                "a request of {length} bytes; the limit is {most}"
            )));
        }
        Ok(Some(PREFIX + length))
    }

    /// Takes out the next message, which has this length and is there.
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

    /// Takes out the next message, if all of it is there.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn complete<R: Message + Default>(&mut self, most: usize) -> Result<Option<R>, Status> {
        match self.length(most)? {
            Some(length) if self.0.len() >= length => self.take(length).map(Some),
            _ => Ok(None),
        }
    }
}

/// Refuses a message of too many fields, before memory is allocated for them.
fn check_fields(mut message: &[u8]) -> Result<(), Status> {
    // Each takes two bytes.
    if message.len() < 2 * limits::FIELDS {
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
    if fields <= limits::FIELDS {
        return Ok(());
    }
    let most = limits::FIELDS;
    Err(Status::resource_exhausted(format!("a request of {fields} fields; the limit is {most}")))
}

#[cfg(test)]
mod tests {
    use skysail_proto::envoy::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

    use super::*;

    fn request(nonce: &str) -> Bytes {
        framed(&DeltaDiscoveryRequest { response_nonce: nonce.into(), ..DeltaDiscoveryRequest::default() })
    }

    /// Requests that come in pieces of this length.
    fn read(bytes: &[u8], piece: usize) -> Vec<Result<String, tonic::Code>> {
        let mut begun = PartialMessage::default();
        let mut read = Vec::new();
        for piece in bytes.chunks(piece) {
            begun.0.extend_from_slice(piece);
            loop {
                match begun.complete::<DeltaDiscoveryRequest>(1 << 20) {
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
        assert_eq!(read(&bytes[..bytes.len() - 1], 7).len(), 2, "the last is not complete");
    }

    #[test]
    fn a_request_of_too_many_fields_is_not_decoded() {
        let names = |count| DeltaDiscoveryRequest {
            resource_names_subscribe: vec![String::new(); count],
            ..DeltaDiscoveryRequest::default()
        };
        assert_eq!(read(&framed(&names(limits::FIELDS)), usize::MAX), [Ok(String::new())]);
        assert_eq!(read(&framed(&names(limits::FIELDS + 1)), usize::MAX), [Err(Code::ResourceExhausted)]);
    }

    #[test]
    fn what_is_no_request_is_refused() {
        assert_eq!(read(&[1, 0, 0, 0, 0], 5), [Err(tonic::Code::Unimplemented)]);
        assert_eq!(read(&[0, 0xff, 0, 0, 0], 5), [Err(tonic::Code::ResourceExhausted)]);
        assert_eq!(read(&[0, 0, 0, 0, 1, 0xff], 6), [Err(tonic::Code::InvalidArgument)]);
    }
}
