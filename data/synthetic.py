"""A synthetic shop: books, games and kits with titles, series, brands, prices, and people in it.

What there is to learn, strongest first: volume n of a series is followed by n + 1; an item's
companions follow it (a detective novel, then a puzzle); a person stays near a few genres and one
price tier; some items are more popular than others. Needs no file and no network. NumPy only; one
seed gives one shop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from data.raw import RawData, events_table

if TYPE_CHECKING:
    from numpy.typing import NDArray

# department: (word for one of its items, prices of the three tiers, genres). A genre has first
# words, second words and makers (budget, middle, premium, two each); a title is "The <first> <second>".
DEPARTMENTS: dict[str, tuple[str, tuple[float, float, float], dict[str, tuple[str, str, str]]]] = {
    "Books": (
        "book",
        (6.0, 12.0, 26.0),
        {
            "Mystery": (
                "Lighthouse Harbour Orchard Midnight Vicarage Canal Winter Clockmaker Ferry Abbey Foxglove Railway",
                "Murders|Inheritance|Affair|Alibi|Letters|Witness|Disappearance|Confession|Verdict|Secret",
                "Penny Lane Press|Corner Crime|Blackwell & Finch|Harbour House|Inspector's Library|Gaslight Editions",
            ),
            "Science Fiction": (
                "Orbital Quantum Martian Silent Fractured Distant Hollow Solar Synthetic Last Drifting Binary",
                "Colony|Horizon|Protocol|Signal|Armada|Archive|Exodus|Paradox|Station|Machine",
                "Rocket Paperbacks|Starlane|Event Horizon Books|Nova & Sons|Perihelion|Deep Field Editions",
            ),
            "Fantasy": (
                "Dragon Raven Ember Silver Thorn Forgotten Crystal Storm Shadow Oaken Wandering Frost",
                "Throne|Crown|Prophecy|Chronicle|Blade|Kingdom|Oath|Covenant|Grimoire|Sword",
                "Hearthfire|Griffin Pocket|Tall Tower|Moonwell|Runestone Press|Gilded Page",
            ),
            "Cookery": (
                "Tuscan Weeknight Lisbon Garden Sourdough Smoky Seaside Kyoto Andalusian Cosy Spice Harvest",
                "Kitchen|Table|Cookbook|Pantry|Suppers|Feast|Bakery|Larder|Oven|Picnic",
                "Thrifty Spoon|Quick Plate|Saffron House|Copper Pan|Michel & Rose|The Long Table",
            ),
            "History": (
                "Roman Hanseatic Ottoman Victorian Viking Byzantine Silk Maritime Medieval Iron Atlantic Colonial",
                "Empire|Republic|Century|Merchants|Frontier|Dynasty|Voyages|Revolt|Trade|Cities",
                "Pocket Past|Plain History|Meridian|Clio Books|Archive & Quill|Grand Atlas",
            ),
        },
    ),
    "Games": (
        "game",
        (15.0, 32.0, 70.0),
        {
            "Strategy Games": (
                "Bronze River Highland Sultan Glacier Guild Desert Trade Island Castle Copper Emperor",
                "Conquest|Settlers|Dominion|Rivals|Frontiers|Campaign|Masters|Empires|Siege|Alliance",
                "Roll & Go|Small Box Games|Meeple Forge|Hexagon House|Warlord Studio|Grand Table",
            ),
            "Co-operative Games": (
                "Sunken Arctic Haunted Jungle Runaway Buried Cursed Volcano Rescue Lunar Outbreak Lost",
                "Expedition|Escape|Temple|Mission|Manor|Laboratory|Rescue|Treasure|Survivors|Voyage",
                "Roll & Go|Friday Night|Together Games|Lantern Works|Deep Quest|Grand Table",
            ),
            "Puzzles": (
                "Baker Logic Cipher Marble Hidden Crooked Secret Infinite Wooden Paper Mosaic Mirror",
                "Labyrinth|Riddles|Cube|Enigma|Locks|Jigsaw|Maze|Casebook|Paradox|Knots",
                "Rainy Day|Brain Bits|Clever Fox|Enigma Works|Ravel & Co|Master Cutters",
            ),
            "Party Games": (
                "Wild Quick Noisy Giggling Secret Dancing Bluffing Speedy Silly Sneaky Lucky Midnight",
                "Charades|Doodles|Impostors|Trivia|Bidders|Whispers|Snapshots|Pirates|Llamas|Judges",
                "Rainy Day|Party Parrot|Friday Night|Loud & Clear|Confetti Lab|Golden Hour",
            ),
        },
    ),
    "Kits": (
        "kit",
        (12.0, 38.0, 95.0),
        {
            "Model Building": (
                "Steam Spitfire Galleon Alpine Viaduct Tramway Clipper Lunar Signal Biplane Harbour Express",
                "Locomotive|Workshop|Station|Fleet|Squadron|Diorama|Bridge|Lander|Depot|Engine",
                "Glue & Go|First Model|Scale Works|Brass Rail|Museum Line|Fine Scale",
            ),
            "Electronics": (
                "Blinking Weather Tinker Walking Retro Sensor Pocket Rolling Radio Synth Talking Laser",
                "Robot|Circuit|Station|Rover|Amplifier|Clock|Arcade|Controller|Receiver|Lab",
                "Spark Box|Bit by Bit|Circuit Barn|Volt & Daughter|Oscilla|Precision Works",
            ),
            "Knitting & Sewing": (
                "Nordic Cable Merino Patchwork Lace Fair-Isle Indigo Meadow Chunky Heirloom Linen Autumn",
                "Shawl|Blanket|Pullover|Quilt|Mittens|Tote|Cardigan|Sampler|Socks|Cushion",
                "Happy Yarn|Thimble|Wool & Willow|Stitch House|Highland Mill|Silk Road Atelier",
            ),
            "Gardening": (
                "Balcony Herb Bonsai Cottage Wildflower Tomato Succulent Orchid Pond Shade Urban Rose",
                "Garden|Planter|Greenhouse|Border|Terrarium|Nursery|Meadow|Trellis|Seedbox|Conservatory",
                "Green Thumb|Sprout|Potting Shed|Acorn & Vine|Kew Lane|Royal Borders",
            ),
        },
    ),
}  # fmt: skip

# Where people go from a genre when a series ends or a companion tempts them.
COMPANION = {
    "Mystery": "Puzzles", "Puzzles": "Mystery", "Science Fiction": "Electronics",
    "Electronics": "Science Fiction", "Fantasy": "Co-operative Games",
    "Co-operative Games": "Fantasy", "History": "Strategy Games",
    "Strategy Games": "Model Building", "Model Building": "History", "Cookery": "Gardening",
    "Gardening": "Knitting & Sewing", "Knitting & Sewing": "Cookery", "Party Games": "Cookery",
}  # fmt: skip

# How a volume is called, by department.
VOLUME = {"Books": "{}, Vol. {}", "Games": "{}: Expansion {}", "Kits": "{}, Set {}"}
SCHEMA = {
    "item_id": pa.string(),
    "title": pa.string(),
    "text": pa.string(),
    "categories": pa.list_(pa.string()),
    "brand": pa.string(),
    "series": pa.string(),
    "volume": pa.int32(),
    "price": pa.float32(),
    "year": pa.int32(),
}
TIERS = ("An inexpensive choice.", "A favourite of many.", "A collector's edition.")
PLACES = (
    "Aberdeen Bergen Bruges Cadiz Cork Delft Dover Evora Florence Galway Ghent Granada Hobart Innsbruck Jaipur "
    "Kyoto Lisbon Lucca Malmo Nantes Oslo Porto Quebec Riga Siena Tallinn Turin Uppsala Verona Whitby York"
).split()

SERIES_SHARE = 0.6  # of titles open a series; the others stand alone
VOLUMES = (3, 6)  # volumes of a series, inclusive
NEXT_VOLUME, COMPANY = 0.55, 0.4  # chance of each where it is possible, in this order
FAVOURITES = (
    0.55,
    0.25,
    0.12,
)  # chance of a person's genres in a free choice; the rest is any genre
LOYALTY = 0.75  # chance that a free choice keeps to the person's own price tier
POPULARITY = 0.9  # exponent of the Zipf law among the openings of one genre and tier
LENGTHS = (5, 60)  # shortest and longest history
REDRAWS = 8  # of an item that the person already has; then the event does not happen
FIRST_DAY, DAYS, DAY_S = 19_358, 700, 86_400  # people join during 700 days from 2023-01-01
GAP_DAYS, VOLUME_GAP_DAYS = 14.0, 4.0  # mean time between events; a next volume comes sooner


@dataclass(frozen=True)
class SyntheticConfig:
    """Size of the shop.

    Attributes:
        users: people.
        items: things on sale.
        mean_length: events a person, on average; hardly anybody has fewer than 5, nobody over 60.
    """

    users: int = 3_000
    items: int = 1_200
    mean_length: float = 12.0

    def __post_init__(self) -> None:
        if self.users < 1 or not 240 <= self.items <= 100_000 or not 5 < self.mean_length <= 30:
            raise ValueError(
                "want users >= 1, 240 <= items <= 100000 and 5 < mean_length <= 30, found "
                f"{self.users}, {self.items} and {self.mean_length}"
            )


@dataclass(frozen=True)
class _Genre:
    name: str
    department: str
    thing: str
    prices: tuple[float, float, float]
    firsts: list[str]
    seconds: list[str]
    makers: list[str]


GENRES = [
    _Genre(name, department, thing, prices, firsts.split(), seconds.split("|"), makers.split("|"))
    for department, (thing, prices, genres) in DEPARTMENTS.items()
    for name, (firsts, seconds, makers) in genres.items()
]


@dataclass(frozen=True)
class _Shop:
    """The catalogue as arrays over dense items; -1 where there is none.

    A cell is a genre and a price tier, numbered `3 * genre + tier`. An opening is the first volume
    of a series, or a title that stands alone.

    Attributes:
        cell: (items,).
        volume: (items,) from 1; 0 for a title that stands alone.
        following: (items,) the next volume.
        companions: (items, 2) what goes with it, the better match first.
        openings: dense items by cell, popular ones first.
        cumulative: running popularity along `openings`; cell c ends at c + 1.
    """

    cell: NDArray[np.int64]
    volume: NDArray[np.int64]
    following: NDArray[np.int64]
    companions: NDArray[np.int64]
    openings: NDArray[np.int64]
    cumulative: NDArray[np.float64]


def generate(config: SyntheticConfig, seed: int = 0) -> RawData:
    """Open a shop and let people buy.

    Args:
        config: its size.
        seed: the same seed gives the same shop, down to the last timestamp.
    """
    rng = np.random.default_rng(seed)
    shop = _open_shop(config.items, rng)
    items = _describe(shop, rng)
    user, item, timestamp, rating = _buy(shop, config, rng)
    width = len(str(config.users))
    names = np.char.add("u", np.char.zfill(np.arange(1, config.users + 1).astype(str), width))
    events = events_table(
        pa.array(names).take(pa.array(user)),
        items["item_id"].combine_chunks().take(pa.array(item)),
        timestamp=timestamp,
        rating=rating,
    )
    return RawData(events, items)


def _open_shop(num_items: int, rng: np.random.Generator) -> _Shop:
    """Series and single titles, dealt to the cells in turn; items of a series are neighbours."""
    sizes = np.where(
        rng.random(num_items) < SERIES_SHARE,
        rng.integers(VOLUMES[0], VOLUMES[1] + 1, num_items),
        1,
    )
    count = int(np.searchsorted(np.cumsum(sizes), num_items)) + 1
    sizes = sizes[:count]
    sizes[-1] -= sizes.sum() - num_items
    starts = np.cumsum(sizes) - sizes
    opening = np.repeat(np.arange(count), sizes)
    cells = 3 * len(GENRES)
    cell = np.concatenate([rng.permutation(cells) for _ in range(-(-count // cells))])[:count]
    place = np.arange(num_items) - starts[opening]
    following = np.where(place + 1 < sizes[opening], np.arange(num_items) + 1, -1)

    by_cell = np.lexsort((rng.random(count), cell))
    rank = np.arange(count) - np.searchsorted(cell[by_cell], cell[by_cell])
    weight = (rank + 1.0) ** -POPULARITY
    share = weight / np.bincount(cell[by_cell], weight)[cell[by_cell]]
    shop = _Shop(
        cell[opening],
        np.where(sizes[opening] > 1, place + 1, 0),
        following,
        np.empty((0, 2), np.int64),
        starts[by_cell],
        np.cumsum(share),
    )
    names = [genre.name for genre in GENRES]
    toward = np.asarray([names.index(COMPANION[name]) for name in names])
    there = 3 * toward[cell // 3] + cell % 3
    companions = np.stack([_draw(shop, there, rng), _draw(shop, there, rng)], axis=1)
    return replace(shop, companions=companions[opening])


def _draw(shop: _Shop, cell: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """One opening for each cell, by popularity."""
    place = np.searchsorted(shop.cumulative, cell + rng.random(len(cell)), side="right")
    return shop.openings[place.clip(max=len(shop.openings) - 1)]


def _describe(shop: _Shop, rng: np.random.Generator) -> pa.Table:
    """Titles, texts and attributes; the volumes of a series share name, maker and about the price."""
    rows: dict[str, list[object]] = {name: [] for name in SCHEMA}
    used = [0] * len(GENRES)
    names = [rng.permutation(len(g.firsts) * len(g.seconds)).tolist() for g in GENRES]
    digits = len(str(len(shop.cell)))
    opening = shop.volume <= 1
    choices = rng.integers(0, 2, len(shop.cell)).tolist()
    years = rng.integers(1998, 2017, len(shop.cell)).tolist()
    spread = rng.lognormal(0.0, 0.15, len(shop.cell)).tolist()
    name = maker = ""
    price, year = 0.0, 0
    for item, (cell, volume) in enumerate(
        zip(shop.cell.tolist(), shop.volume.tolist(), strict=True)
    ):
        number, tier = divmod(cell, 3)
        genre = GENRES[number]
        if opening[item]:
            name = _name(genre, names[number], used[number])
            used[number] += 1
            maker = genre.makers[2 * tier + choices[item]]
            price, year = genre.prices[tier] * spread[item], years[item]
        title = VOLUME[genre.department].format(name, volume) if volume else name
        part = f" Part {volume} of the series {name}." if volume else ""
        article = "An" if genre.name[0] in "AEIOU" else "A"
        rows["item_id"].append(f"{genre.thing}-{item + 1:0{digits}d}")
        rows["title"].append(title)
        rows["text"].append(
            f"{title}. {article} {genre.name.lower()} {genre.thing} by {maker}.{part} {TIERS[tier]}"
        )
        rows["categories"].append([genre.department, genre.name])
        rows["brand"].append(maker)
        rows["series"].append(name if volume else None)
        rows["volume"].append(volume or None)
        rows["price"].append(round(price) + 0.99)
        rows["year"].append(year + volume)
    return pa.table({key: pa.array(rows[key], kind) for key, kind in SCHEMA.items()})


def _name(genre: _Genre, order: list[int], used: int) -> str:
    """The next unused name of a genre; a place is added when the plain names have run out."""
    again, place = divmod(used, len(order))
    first, second = divmod(order[place], len(genre.seconds))
    name = f"{genre.firsts[first]} {genre.seconds[second]}"
    if genre.department == "Books":
        name = f"The {name}"
    if genre.department == "Kits":
        name = f"{name} Kit"
    return f"{name} of {PLACES[again - 1]}" if again else name


def _buy(
    shop: _Shop, config: SyntheticConfig, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Everybody's purchases, one step of all people at a time.

    Returns:
        user, item, unix seconds and rating of each event, by user and time.
    """
    people = config.users
    shortest, longest = LENGTHS
    lengths = shortest - 1 + rng.geometric(1 / (config.mean_length - shortest + 1), people)
    lengths = np.minimum(lengths, longest)
    favourites, tiers = _tastes(people, rng)
    bought = np.full((people, int(lengths.max())), -1, np.int64)
    days = np.zeros(bought.shape)
    now = rng.random(people) * DAYS
    last = np.full(people, -1)
    for step in range(bought.shape[1]):
        who = np.flatnonzero(lengths > step)
        item, sequel = _choose(shop, who, last[who], favourites, tiers, rng)
        for _ in range(REDRAWS):
            again = np.flatnonzero((bought[who, :step] == item[:, None]).any(axis=1))
            if not len(again):
                break
            item[again] = _browse(shop, who[again], favourites, tiers, rng)
            sequel[again] = False
        item[(bought[who, :step] == item[:, None]).any(axis=1)] = -1
        now[who] += rng.exponential(np.where(sequel, VOLUME_GAP_DAYS, GAP_DAYS))
        bought[who, step], days[who, step] = item, now[who]
        last[who] = np.where(item >= 0, item, last[who])
    happened = bought >= 0
    user = np.nonzero(happened)[0]
    item = bought[happened]
    genre, tier = np.divmod(shop.cell[item], 3)
    liking = (
        3.4 + 0.6 * (genre[:, None] == favourites[user]).any(axis=1) + 0.5 * (tier == tiers[user])
    )
    rating = np.clip(np.round(liking + rng.normal(0, 0.7, len(item))), 1, 5)
    seconds = ((FIRST_DAY + days[happened]) * DAY_S).astype(np.int64)
    return user, item, seconds, rating.astype(np.float32)


def _tastes(people: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(people, 3) favourite genres: one, its companion, one more; and (people,) price tiers."""
    names = [genre.name for genre in GENRES]
    toward = np.asarray([names.index(COMPANION[name]) for name in names])
    liked = 1 / np.sqrt(1 + rng.permutation(len(names)))
    liked /= liked.sum()
    first = rng.choice(len(names), people, p=liked)
    third = rng.choice(len(names), people, p=liked)
    return np.stack([first, toward[first], third], axis=1), rng.choice(
        3, people, p=(0.35, 0.45, 0.2)
    )


def _choose(
    shop: _Shop,
    who: NDArray[np.int64],
    last: NDArray[np.int64],
    favourites: NDArray[np.int64],
    tiers: NDArray[np.int64],
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The next volume, a companion of the last item, or something from browsing the shop.

    Returns:
        an item for each of `who`, and whether it is a next volume.
    """
    item = _browse(shop, who, favourites, tiers, rng)
    chance = rng.random((3, len(who)))
    company = (last >= 0) & (chance[1] < COMPANY)
    second = (chance[2] < 0.3).astype(np.int64)
    item[company] = shop.companions[last[company], second[company]]
    sequel = (last >= 0) & (shop.following[last] >= 0) & (chance[0] < NEXT_VOLUME)
    item[sequel] = shop.following[last[sequel]]
    return item, sequel


def _browse(
    shop: _Shop,
    who: NDArray[np.int64],
    favourites: NDArray[np.int64],
    tiers: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """A popular opening from a genre and a price tier that each of `who` likes."""
    liked = np.searchsorted(np.cumsum(FAVOURITES), rng.random(len(who)), side="right")
    genre = rng.integers(0, len(GENRES), len(who))
    fond = liked < len(FAVOURITES)
    genre[fond] = favourites[who[fond], liked[fond]]
    tier = np.where(rng.random(len(who)) < LOYALTY, tiers[who], rng.integers(0, 3, len(who)))
    return _draw(shop, 3 * genre + tier, rng)
