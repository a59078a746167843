import asyncio
import random

URL = "/v1/recommendations"


async def test_500_concurrent_requests_are_answered_as_if_alone(settings, recommender, running):
    rng = random.Random(7)
    roomy = settings.model_copy(update={"queue_limit": 1000, "deadline_ms": 60_000.0})

    async with running(roomy, recommender=recommender) as (client, _):

        async def inline(number):
            history = [f"item-{rng.randrange(320)}" for _ in range(rng.randrange(30))] + ["item-1"]
            k, seen = rng.randrange(1, 201), rng.random() < 0.5
            hidden = [f"item-{rng.randrange(300)}" for _ in range(rng.randrange(5))]
            response = await client.post(
                URL,
                json={"history": history, "k": k, "exclude_seen": seen, "exclude_items": hidden},
                headers={"X-Request-ID": f"r{number}"},
            )
            expected = recommender.expected(history, k, exclude_seen=seen, exclude_items=hidden)
            assert [item["item_id"] for item in response.json()["items"]] == expected
            assert response.headers["x-request-id"] == f"r{number}"

        async def user(number):
            response = await client.get(f"/v1/users/ada/recommendations?k={1 + number % 200}")
            expected = recommender.expected(["item-1", "item-2"], 1 + number % 200)
            assert [item["item_id"] for item in response.json()["items"]] == expected

        async def wrong(number):
            response = await client.post(URL, json={"history": [], "k": -number})
            assert response.status_code == 422

        async def unknown(number):
            response = await client.post(URL, json={"user": f"no-{number}", "fallback": False})
            assert response.status_code == 404

        async def item(number):
            response = await client.get(f"/v1/items/item-{number % 300}")
            assert response.json()["title"] == f"Thing no. {number % 300}"

        kinds = [inline, inline, inline, user, user, wrong, unknown, item]
        await asyncio.gather(*(rng.choice(kinds)(number) for number in range(500)))

    assert max(recommender.batches) > 1
    assert max(recommender.batches) <= roomy.max_batch
