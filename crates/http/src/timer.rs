//! Timers of a worker: movable deadlines, sleeps and timeouts.
//!
//! Most deadlines move long before they expire, because each request sets a new one. A [`Timer`] therefore registers
//! with its thread only if it has no registration, or one that is too late. If a registration expires too early, the
//! timer registers again. The kernel has only the earliest registration, in a `timerfd` that the worker's event loop
//! watches like a socket. Steady traffic therefore sets no kernel timer and adds few registrations. The timers of the
//! runtime are not used, because the runtime checks them before each wait.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    future::{Future, poll_fn},
    io,
    os::fd::AsFd as _,
    pin::pin,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use tokio::net::unix::pipe;

thread_local! {
    static TIMERS: Timers = const { Timers::new() };
}

/// The timers of a thread.
struct Timers {
    /// Wakers by deadline; the number distinguishes equal deadlines.
    waiting: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next: Cell<u64>,
    /// All registrations up to this instant have been woken and removed.
    woken: Cell<Option<Instant>>,
    /// The kernel timer, and the instant for which it is set.
    alarm: RefCell<Option<TimerFd>>,
    set: Cell<Option<Instant>>,
}

/// Starts the timers of this thread. They run while the returned future is polled.
///
/// # Errors
/// The system provides no timer, or there is no runtime.
pub fn start() -> io::Result<impl Future<Output = ()>> {
    let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
    let alarm = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
    // The event loop watches the timer like the receiving end of a pipe.
    let watched = pipe::Receiver::from_owned_fd_unchecked(alarm.as_fd().try_clone_to_owned()?)?;
    TIMERS.with(|timers| *timers.alarm.borrow_mut() = Some(alarm));
    Ok(async move {
        // Fails only when the runtime shuts down.
        while watched.readable().await.is_ok() {
            // The number of expirations does not matter.
            while watched.try_read(&mut [0; 8]).is_ok() {}
            TIMERS.with(|timers| timers.wake(Instant::now()));
        }
    })
}

/// Waits for a duration.
pub async fn sleep(duration: Duration) {
    let mut timer = Timer::default();
    let end = Instant::now() + duration;
    poll_fn(|cx| timer.poll(cx, Some(end))).await;
}

/// Returns the output of a future, or `None` if it takes longer than `limit`.
pub async fn timeout<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let mut timer = Timer::default();
    let end = Instant::now() + limit;
    let mut future = pin!(future);
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => timer.poll(cx, Some(end)).map(|()| None),
    })
    .await
}

impl Timers {
    const fn new() -> Self {
        Self {
            waiting: RefCell::new(BTreeMap::new()),
            next: Cell::new(0),
            woken: Cell::new(None),
            alarm: RefCell::new(None),
            set: Cell::new(None),
        }
    }

    fn add(&self, at: Instant, waker: Waker) -> (Instant, u64) {
        let key = (at, self.next.get());
        self.next.set(key.1 + 1);
        self.waiting.borrow_mut().insert(key, waker);
        if self.set.get().is_none_or(|set| at < set) {
            self.set_alarm(Some(at));
        }
        key
    }

    /// Wakes all registrations that have expired.
    fn wake(&self, now: Instant) {
        self.woken.set(Some(now));
        while let Some(waker) = self.take_due(now) {
            waker.wake();
        }
        let next = self.waiting.borrow().keys().next().map(|(at, _)| *at);
        self.set_alarm(next);
    }

    fn take_due(&self, now: Instant) -> Option<Waker> {
        let mut waiting = self.waiting.borrow_mut();
        let first = waiting.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    fn set_alarm(&self, at: Option<Instant>) {
        self.set.set(at);
        let alarm = self.alarm.borrow();
        let Some(alarm) = &*alarm else { return };
        let done = match at {
            // Zero would disarm the timer.
            Some(at) => alarm.set(
                Expiration::OneShot(TimeSpec::from_duration(
                    at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)),
                )),
                TimerSetTimeFlags::empty(),
            ),
            None => alarm.unset(),
        };
        if let Err(error) = done {
            tracing::error!("cannot set the kernel timer (timerfd), so that timeouts may not fire: {error}");
        }
    }
}

/// A timer with a movable deadline.
#[derive(Default)]
pub struct Timer {
    registration: Option<Registration>,
}

/// A registration with the thread's timers, removed on drop.
struct Registration {
    key: (Instant, u64),
    waker: Waker,
}

impl Timer {
    /// Becomes ready when `deadline` has passed; without a deadline, never.
    pub fn poll(&mut self, cx: &mut Context<'_>, deadline: Option<Instant>) -> Poll<()> {
        let Some(deadline) = deadline else { return Poll::Pending };
        if let Some(registration) = &self.registration
            && registration.key.0 <= deadline
            && registration.is_waiting()
            && registration.waker.will_wake(cx.waker())
        {
            return Poll::Pending;
        }
        self.registration = None;
        if Instant::now() >= deadline {
            return Poll::Ready(());
        }
        let waker = cx.waker().clone();
        self.registration =
            Some(Registration { key: TIMERS.with(|timers| timers.add(deadline, waker.clone())), waker });
        Poll::Pending
    }
}

impl Registration {
    fn is_waiting(&self) -> bool {
        TIMERS.with(|timers| timers.woken.get().is_none_or(|woken| self.key.0 > woken))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // At the end of the thread, the timers may have been dropped.
        let waker = TIMERS.try_with(|timers| timers.waiting.borrow_mut().remove(&self.key));
        drop(waker);
    }
}

/// Returns the earlier of two optional deadlines, or the lesser of two optional durations.
#[inline]
pub fn earlier<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        task::{Wake, ready},
    };

    use super::*;

    struct NoWake;

    impl Wake for NoWake {
        fn wake(self: Arc<Self>) {}
    }

    fn waiting() -> Vec<Instant> {
        TIMERS.with(|timers| timers.waiting.borrow().keys().map(|(at, _)| *at).collect())
    }

    #[test]
    fn a_deadline_may_move_both_ways() {
        let waker = Arc::new(NoWake).into();
        let mut cx = Context::from_waker(&waker);
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let mut timer = Timer::default();
        assert!(timer.poll(&mut cx, None).is_pending());
        assert!(waiting().is_empty());
        // The kernel timer is set only for an earlier deadline.
        for (deadline, registration) in [(60, 60), (70, 60), (50, 50), (60, 50)] {
            assert!(timer.poll(&mut cx, Some(after(deadline))).is_pending());
            assert_eq!(waiting(), [after(registration)]);
            assert_eq!(TIMERS.with(|timers| timers.set.get()), Some(after(registration)));
        }
        // Woken for the old deadline, the timer waits for the new one.
        TIMERS.with(|timers| timers.wake(after(55)));
        assert!(waiting().is_empty());
        assert!(timer.poll(&mut cx, Some(after(60))).is_pending());
        assert_eq!(waiting(), [after(60)]);
        assert!(timer.poll(&mut cx, Some(now)).is_ready());
        assert!(waiting().is_empty());
        assert!(timer.poll(&mut cx, Some(after(60))).is_pending());
        drop(timer);
        assert!(waiting().is_empty());
    }

    /// A waker that records its calls.
    struct Recorder(usize, Arc<Mutex<Vec<usize>>>);

    impl Wake for Recorder {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }

    #[test]
    fn timers_are_woken_in_the_order_of_deadlines() {
        let woken = Arc::new(Mutex::new(Vec::new()));
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let _timers: Vec<Timer> = [300, 100, 200, 100]
            .into_iter()
            .enumerate()
            .map(|(number, seconds)| {
                let waker = Arc::new(Recorder(number, Arc::clone(&woken))).into();
                let mut timer = Timer::default();
                assert!(timer.poll(&mut Context::from_waker(&waker), Some(after(seconds))).is_pending());
                timer
            })
            .collect();
        TIMERS.with(|timers| timers.wake(after(100)));
        assert_eq!(*woken.lock().unwrap(), [1, 3]);
        TIMERS.with(|timers| timers.wake(after(400)));
        assert_eq!(*woken.lock().unwrap(), [1, 3, 2, 0]);
    }

    #[tokio::test]
    async fn the_kernel_timer_wakes_a_sleep() {
        let driver = start().unwrap();
        let begin = Instant::now();
        let millis = Duration::from_millis;
        tokio::select! {
            () = sleep(millis(30)) => {}
            () = driver => panic!("it ended"),
        }
        assert!(begin.elapsed() >= millis(30));
    }

    #[tokio::test]
    async fn a_timeout_ends_a_longer_future() {
        let mut driver = pin!(start().unwrap());
        let limited = async {
            assert_eq!(timeout(Duration::from_secs(60), async { 7 }).await, Some(7));
            assert_eq!(timeout(Duration::from_millis(1), std::future::pending::<()>()).await, None);
        };
        let mut limited = pin!(limited);
        poll_fn(|cx| {
            assert!(driver.as_mut().poll(cx).is_pending());
            ready!(limited.as_mut().poll(cx));
            Poll::Ready(())
        })
        .await;
    }
}
